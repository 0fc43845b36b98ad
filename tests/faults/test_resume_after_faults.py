"""A run that has failed, for whatever reason, can be resumed."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import OocGemmError
from tests.support.faults import Fault, faulty_backend, faulty_stores, nothing_left
from tests.support.faulty_runs import PRODUCT, TILE, B, store
from tests.support.suite import slow, thinned

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@contextmanager
def faulty_call(name: str, fault: Fault) -> Iterator[None]:
    right = getattr(os, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        fault.strike()
        return right(*arguments, **options)

    with patch.object(os, name, failing):
        yield


STRIKES: dict[str, Callable[[Fault], Any]] = {
    "reading A": lambda fault: faulty_stores(read_A=fault),
    "reading C": lambda fault: faulty_stores(read_C=fault),
    "writing C": lambda fault: faulty_stores(write_C=fault),
    "a launch": lambda fault: faulty_backend(multiply=fault),
    "a launch, later": lambda fault: faulty_backend(True, multiply=fault),
    "a sync": lambda fault: faulty_call("fsync", fault),
    "a name": lambda fault: faulty_call("replace", fault),
}


@pytest.mark.parametrize("name", ["raw", *slow(("shards",), ("C.npy",))])
@pytest.mark.parametrize("beta", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("strikes", thinned(STRIKES, ("reading A", "writing C", "a launch, later", "a sync")))
def test_a_run_that_has_failed_can_be_gone_on_with(
    tmp_path: Path, strikes: str, beta: int, name: str
) -> None:
    a, b = store(tmp_path / "A", "raw"), store(tmp_path / "B", "zstd", B)
    c = tmp_path / "C"
    if name == "C.npy":
        c = tmp_path / name
        np.save(c, PRODUCT)
    else:
        store(c, name, PRODUCT)
    options: dict[str, Any] = {"beta": beta, "backend": "host", "tile": TILE, "overwrite": True}
    failed = 0
    for first in (1, 4, 3, 9, 20):  # each run finishes a few tiles before it fails
        with nothing_left(tmp_path), STRIKES[strikes](Fault(OSError(errno.EDQUOT, "no more"), first=first)):
            try:
                oocgemm.gemm(a, b, c, resume=failed > 0, **options)
            except OocGemmError as error:
                assert "no more" in str(error)
                failed += 1
            else:
                break
    assert failed or (strikes, beta) == ("reading C", 0)
    oocgemm.gemm(a, b, c, resume=True, **options)
    found = np.load(c) if name == "C.npy" else zarr.open_array(c)[:]
    np.testing.assert_array_equal(found, PRODUCT * (1 + beta))
