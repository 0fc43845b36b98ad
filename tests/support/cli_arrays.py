"""The arrays that the tests of the command line multiply."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.support.built import copy_built
from tests.support.problems import Array, integers

RNG = np.random.default_rng(11)
A, B, C = (integers(RNG, shape, "float64") for shape in ((12, 8), (8, 10), (12, 10)))
Z, Y = (integers(RNG, shape, "complex128") for shape in ((12, 8), (8, 10)))
ARRAYS = {
    "a": A, "b": B, "c": C, "at": A.T, "bt": B.T,
    "z": Z, "y": Y, "zt": Z.T, "yt": Y.T, "zh": Z.conj().T, "yh": Y.conj().T,
    "ones1": np.ones((12, 8)), "ones2": np.ones((8, 10)),
}  # fmt: skip


def stored(place: str) -> Array:
    return np.asarray(zarr.open_array(place, mode="r")[:])


def folder_of_arrays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create all of `ARRAYS` in a folder, and make it the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OOCGEMM_DEBUG", raising=False)
    copy_built("cli-arrays", _build, folder)
    return folder


def _build(folder: Path) -> None:
    for name, array in ARRAYS.items():
        zarr.create_array(folder / name, data=array, chunks=(4, 4), compressors=None)
