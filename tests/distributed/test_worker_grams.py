"""Workers compute Gram matrices, correlations and relationships with the bits of one process."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import oocgemm
from oocgemm.distributed import coordinator
from oocgemm.planning import TileShape
from oocgemm.planning.cover import GRAMS, Cover, Triangle
from oocgemm.planning.partition import bands
from oocgemm.planning.tiling import TileGrid
from tests.support.clusters import all_ended, children, content, fresh
from tests.support.small_runs import EXTENT, MEMORY, prepare
from tests.support.staying import Stay
from tests.support.suite import examples, slow

OPTIONS: dict[str, Any] = {"tile": "16x16x16", "memory": MEMORY, "backend": "host"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


def gram(folder: Path, name: str, *, old: bool = False, **options: Any) -> bytes:
    """Return the bytes of a Gram matrix at a path. With `old`, something is there before."""
    fresh(folder, folder / name, old=old)
    new = {"chunks": (8, 8)} if name.endswith(".zarr") and not old else {}
    oocgemm.gram(folder / "A.zarr", folder / name, **(OPTIONS | new | options))
    return stored(folder / name)


def stored(c: Path) -> bytes:
    """Return the bytes of C, which must be complete."""
    if c.suffix == ".npy":
        return content(c)
    if c.suffix == ".bin":
        return c.read_bytes()
    array = zarr.open_array(c, mode="r")
    assert array.attrs["oocgemm"] == {"uplo": array.attrs["oocgemm"]["uplo"]}  # type: ignore[index, call-overload]
    assert [path.name for path in (c / ".oocgemm").iterdir() if path.is_dir()] == []
    return bytes(np.asarray(array[:]).data)


FEW: list[tuple[str, str, dict[str, Any]]] = [
    ("full", "C.zarr", {"beta": 0.5, "old": True}),
    ("upper", "C.npy", {"transform": oocgemm.Transform(center="k"), "verify": True}),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("lower", "C.zarr", {"axis": 1}),
    ("lower", "C.npy", {"beta": 1.0, "old": True}),
    ("upper", "C.zarr", {"overwrite": True, "old": True}),
    ("lower", "C.grm.bin", {"out_dtype": "float32", "transform": oocgemm.Transform(cast="float32")}),
    ("full", "C.npy", {"epilogue": [oocgemm.Correlation()], "verify": True}),
    ("full", "C.zarr", {"overwrite": True, "old": True, "verify": True}),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_the_bits_are_those_of_one_process(
    here: Path, cases: list[tuple[str, str, dict[str, Any]]], stay: Stay, subtests: pytest.Subtests
) -> None:
    stay(60)
    for uplo, name, options in cases:
        with subtests.test(f"{uplo}, {name}, {options}"):
            assert gram(here, name, uplo=uplo, **options) == gram(here, name, uplo=uplo, workers=2, **options)
    oocgemm.release()
    assert all_ended(here)


@pytest.mark.parametrize("verb", ["corr", *slow(("cov",), ("grm",))])
def test_standardized_rows_have_the_bits_of_one_process(here: Path, verb: str) -> None:
    x = np.random.default_rng(3).integers(-1, 3, (40, EXTENT)).astype(np.int8)
    if verb != "grm":
        x[x < 0] = 0
    zarr.create_array(here / "x.zarr", data=x, chunks=(8, EXTENT))
    more: dict[str, Any] = {"uplo": "lower", "pairwise": True} if verb == "grm" else {}
    found = []
    for workers in (None, 2):
        many = {} if workers is None else {"workers": workers}
        result = getattr(oocgemm, verb)(
            here / "x.zarr", here / f"{workers}.zarr", **OPTIONS | {"tile": "8x8x32"} | more | many
        )
        found.append([np.asarray(result), np.asarray(getattr(result, "counts", 0))])
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one, two)


def test_a_killed_worker_and_a_resumed_run_lose_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gram(here, "C.zarr")
    fresh(here, here / "C.zarr", old=False)
    adopt, adopted = coordinator.Coordinator._adopt, []

    def interrupted(self: Any, folder: Path, tile: Any, files: str) -> bool:
        done = adopt(self, folder, tile, files)
        adopted.append(tile)
        if len(adopted) == 1:
            for child in children(here):
                os.kill(child.pid, signal.SIGKILL)
        if len(adopted) == 6:
            raise KeyboardInterrupt
        return done

    options = OPTIONS | {"workers": 2, "chunks": (8, 8)}
    monkeypatch.setattr(coordinator.Coordinator, "_adopt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        oocgemm.gram(here / "A.zarr", here / "C.zarr", **options)
    monkeypatch.setattr(coordinator.Coordinator, "_adopt", adopt)
    result = oocgemm.gram(here / "A.zarr", here / "C.zarr", **OPTIONS, workers=1, resume=True)
    assert len(result.plan.done) >= 5
    assert stored(here / "C.zarr") == right


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 10),
    st.sampled_from([None, *GRAMS]),
    st.integers(1, 4),
)
@pytest.mark.parametrize("limit", [examples(100)])
def test_bands_have_every_tile_once_and_are_nearly_equal(
    limit: int, rows: int, side: int, count: int, uplo: str | None, wide: int
) -> None:
    cover = Cover() if uplo is None else Triangle(upper=uplo == "upper", mirrored=uplo == "full")
    n = rows * side if uplo else wide * side
    grid = TileGrid(rows * side, n, 1, TileShape(side, side, 1), cover)
    parts = bands(grid, count)
    assert len(parts) == min(count, rows)
    tiles = [tile for part in parts for tile in part.tiles(grid)]
    areas = {tile: grid.elements(tile) for tile in tiles}
    assert len(tiles) == len(set(tiles)) == grid.count
    assert all(one.rows[1] == two.rows[0] for one, two in pairwise(parts))
    largest = max(part.tiles(grid).coverage.elements for part in parts)
    widest = max(sum(area for (i, _), area in areas.items() if i == row) for row in range(rows))
    assert largest <= sum(areas.values()) / len(parts) + widest
