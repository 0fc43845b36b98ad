"""`verify=True`: correct products pass, and the checks keep to the memory of the plan."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oocgemm
from oocgemm.backends.base import HostBlock
from oocgemm.integrity.host_checksums import HostSums
from oocgemm.planning import Kind, Operation
from oocgemm.planning.search import slot_counts
from tests.support.problems import DTYPES, drawn_product, scaled
from tests.support.suite import each_value, examples
from tests.support.tampering import ENGINES, SUMMED, checked, on_device, one_element, operands, product


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_correct_products_pass(engine: str, data: st.DataObject) -> None:
    a, b, c, options = drawn_product(data)
    tile = data.draw(st.none() | st.builds("{}x{}x{}".format, *(st.integers(10, 200),) * 3), "tile")
    result = product(engine, a, b, c, tile=tile, **options)
    found = checked(result)
    assert found["recomputed"] == []
    assert found["blocks"] > 0


@each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_numbers_are_decided(engine: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (scaled(rng, (300, 300), dtype, "normal") for _ in "ABC")
    found = checked(product(engine, a, b, c, alpha=0.5, beta=2, tile="150x200x64"))
    assert found["undecided"] == 0
    assert found["tiles"] == 4


def test_without_verify_nothing_is_noticed() -> None:
    """The changes that the other tests make are errors, which a run without checks does not notice."""
    a, b, _ = operands()
    with on_device(lambda o: o.kind is Kind.MULTIPLY and o.tile == (0, 0), one_element):
        result = oocgemm.gemm(a, b, backend="host", tile="80x100x30")
    assert result.report.checks is None
    assert (result.out != a @ b).any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("beta", [0, 1])
def test_a_last_strip_that_is_shorter_passes(engine: str, beta: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_counts, "STRIP_BYTES", 1)
    monkeypatch.setattr(slot_counts, "STAGED_STRIPS", 3)
    monkeypatch.setattr(slot_counts, "STRIPS", 3)
    rng = np.random.default_rng(9)
    a, b, c = (scaled(rng, shape, "float64", "normal") for shape in ((1000, 60), (60, 90), (1000, 90)))
    result = product(engine, a, b, c, beta=beta, tile="700x90x60")
    assert 700 % result.plan.slots.strip > 128
    assert checked(result)["recomputed"] == []


@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_checksums_are_within_the_plan(data: st.DataObject) -> None:
    """The memory that checksums take is at most what the plan reserves for them."""
    m, n, k = (data.draw(st.integers(50, 400)) for _ in "mnk")
    most = 0
    right = HostSums.submit

    def submit(self: HostSums, operation: Operation, host: HostBlock) -> None:
        nonlocal most
        right(self, operation, host)
        sums = {id(x): x.sums.nbytes + x.norms.nbytes for x in list(self._panels.values())}
        tiles = ([x.product, x.norm, x.old, x.old_norm] for x in list(self._tiles.values()))
        most = max(most, sum(sums.values()) + sum(x.nbytes for tile in tiles for x in tile))

    dtype = data.draw(st.sampled_from(DTYPES))
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    with patch.object(HostSums, "submit", submit):
        result = product(
            data.draw(st.sampled_from(["host", "host-staged"])),
            a,
            b,
            tile="64x80x40",
            device_memory="40MiB",
            host_memory="40MiB",
        )
    footprint = result.plan.footprint
    assert 0 < most + 8 * (m + n) <= footprint.host["checks"]
    assert footprint.host_total <= result.plan.budgets.host


@pytest.mark.parametrize("engine", SUMMED)
def test_a_device_that_takes_checksums_keeps_to_its_budget(engine: str) -> None:
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((700, 500)), rng.standard_normal((500, 600))
    result = product(engine, a, b, device_memory="100MiB", host_memory="20MiB", tile="160x150x64")
    held = result.timeline.header["held"]
    assert 0 < held["device"] <= result.plan.footprint.device_total <= 100 << 20
    assert 0 < held["host"] <= result.plan.footprint.host_total <= 20 << 20
    assert checked(result)["undecided"] == 0
