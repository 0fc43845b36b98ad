"""The host backend's selection of the largest elements of rows, compared with a sort of each row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.backends.base import SELECTED
from oocgemm.backends.host import selection
from oocgemm.planning.device_memory import NONE
from tests.support.suite import examples


@settings(max_examples=examples(100, quick=10), deadline=None)
@given(st.data())
def test_blocks_of_any_width_keep_the_largest_elements(data: st.DataObject) -> None:
    """Rows have ties, zeros of both signs, Inf and NaN, which ranks last."""
    rows, count = data.draw(st.integers(1, 80)), data.draw(st.sampled_from([1, 2, 6, 64, 65, 150]))
    widths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    spread = data.draw(st.sampled_from([2, 40, 10**6]))
    special = [-0.0, 0.0, np.inf, -np.inf, np.nan]
    values: Any = np.append(rng.integers(-spread, spread + 1, 3 * sum(widths)), special)
    name, score = data.draw(st.sampled_from([("void64", "float32"), ("void128", "float64")]))
    sums = rng.choice(values, (rows, sum(widths))).astype(score)
    excludes_self, across, alone = (data.draw(st.booleans()) for _ in range(3))
    kept = np.empty((rows, count), SELECTED[name])
    kept.view(np.uint8)[...] = NONE
    none = kept["index"][0, 0]
    left = 0
    with pytest.MonkeyPatch.context() as patch:
        if alone:
            patch.setattr(selection, "compiled", lambda: None)
        for width in widths:
            block = sums[:, left : left + width]
            block = np.asfortranarray(block) if across else block
            selection.select(kept, block, None, (0, left), excludes_self)
            left += width
    for row, (scores, found) in enumerate(zip(sums, kept, strict=True)):
        columns = np.array([col for col in range(len(scores)) if not (excludes_self and col == row)], int)
        ranked = columns[np.lexsort((columns, -scores[columns]))][:count].tolist()
        assert found["index"][: len(ranked)].tolist() == ranked
        np.testing.assert_array_equal(found["score"][: len(ranked)], scores[ranked])
        assert (found["index"][len(ranked) :] == none).all()
