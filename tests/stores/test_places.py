"""Whether a result can be written is found before operands are read: space and permission, by every verb."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import InputError, Transform
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.stores.genetics import BedMatrix
from oocgemm.stores.zarr_matrix import ZarrMatrix
from tests.support.command import command, contents
from tests.support.plink import genotypes, write_bed

N, K = 300, 40


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    for name, dtype in (("x", "f4"), ("y", "f8"), ("i", "i1")):
        data = rng.integers(-9, 9, (N, K)).astype(dtype)
        zarr.create_array(tmp_path / f"{name}.zarr", data=data, chunks=(100, 20))
    write_bed(tmp_path / "g.bed", genotypes(rng, N, K))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def unread(free: int = 1 << 40) -> Iterator[None]:
    """Fail if an element is read. The disk has `free` bytes."""

    def read(*_: Any, **__: Any) -> None:
        pytest.fail("elements are read before the place of the result is checked")

    with (
        patch.object(ZarrMatrix, "read", read),
        patch.object(BedMatrix, "read", read),
        patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=free)),
    ):
        yield


# Commands with the least bytes that their results take; 0 if that is not known before.
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "topk": (("similarity", "x.zarr", "OUT", "--topk", "10"), 12 * N * 10),
    "topk of float64": (("similarity", "y.zarr", "OUT", "--topk", "10"), 16 * N * 10),
    "topk of int8": (("similarity", "i.zarr", "OUT", "--topk", "10", "--metric", "dot"), 16 * N * 10),
    "topk of all": (("similarity", "x.zarr", "OUT", "--topk", "2000"), 12 * N * N),
    "threshold": (("similarity", "x.zarr", "OUT", "--threshold", "0.5"), 0),
    "corr": (("corr", "x.zarr", "OUT"), 4 * N * N),
    "corr of columns": (("corr", "y.zarr", "OUT", "--axis", "1"), 8 * K * K),
    "corr topk": (("corr", "x.zarr", "OUT", "--topk", "5"), 12 * N * 5),
    "corr topk of columns": (("corr", "x.zarr", "OUT", "--topk", "5", "--axis", "1"), 12 * K * 5),
    "corr threshold": (("corr", "x.zarr", "OUT", "--threshold", "0.5"), 0),
    "corr without constant rows": (("corr", "x.zarr", "OUT", "--constant", "drop"), 0),
    "cov": (("cov", "x.zarr", "OUT"), 4 * N * N),
    "pca": (("pca", "x.zarr", "OUT", "--components", "3"), 4 * 3 * K),
    "pca with scores": (("pca", "y.zarr", "OUT", "--components", "3", "--scores"), 8 * 3 * (N + K)),
    "grm": (("grm", "g.bed", "OUT"), 4 * N * N),
    "grm of gcta": (("grm", "g.bed", "OUT.grm.bin"), 8 * (N * (N + 1) // 2)),
    "grm npy": (("grm", "g.bed", "OUT.npy"), 4 * N * N),
    "gram": (("gram", "x.zarr", "OUT", "--uplo", "full", "--transform", "center=k"), 4 * N * N),
    "run": (("run", "x.zarr", "x.zarr", "OUT", "--transpose-b", "--transform-a", "center=k"), 4 * N * N),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_place_without_permission_is_refused_before_anything_is_read(here: Path, case: str) -> None:
    line, _ = COMMANDS[case]
    before = contents(here)
    for place in ("/proc/new", "/sys/new/folder/new"):
        with unread():
            done = command(*(part.replace("OUT", place) for part in line), "--backend", "host")
        assert (done.code, "cannot create" in done.err) == (EXIT_USAGE, True), done.err
        assert place in done.err
    assert contents(here) == before


@pytest.mark.parametrize("case", [case for case, (_, wanted) in COMMANDS.items() if wanted])
def test_a_disk_without_space_is_refused_before_anything_is_read(here: Path, case: str) -> None:
    line, wanted = COMMANDS[case]
    before = contents(here)
    with unread(free=wanted - 1):
        done = command(*(part.replace("OUT", "new") for part in line), "--backend", "host")
    assert (done.code, "free: make room for" in done.err) == (EXIT_USAGE, True), done.err
    assert contents(here) == before


def test_results_of_unknown_size_are_not_refused_for_space(here: Path) -> None:
    with patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=1)):
        done = command("similarity", "x.zarr", "new", "--threshold", "0.9", "--backend", "host")
        assert done.code == 0, done.err
        done = command("corr", "x.zarr", "c", "--compressor", "zstd", "--backend", "host")
        assert "make room" not in done.err.lower() or "takes" not in done.err


LIBRARY: dict[str, Callable[[str], Any]] = {
    "gemm": lambda c: oocgemm.gemm("x.zarr", "x.zarr", c, trans_b="T", transform_a=Transform(center="k")),
    "gram": lambda c: oocgemm.gram("x.zarr", c, transform=Transform(center="k")),
    "corr": lambda c: oocgemm.corr("x.zarr", c),
    "cov": lambda c: oocgemm.cov("x.zarr", c),
    "grm": lambda c: oocgemm.grm("g.bed", c),
    "pca": lambda c: oocgemm.pca("x.zarr", 3, c),
}


@pytest.mark.parametrize("verb", LIBRARY)
def test_functions_refuse_a_place_before_anything_is_read(here: Path, verb: str) -> None:
    with unread(), pytest.raises(InputError, match="cannot create /proc/new"):
        LIBRARY[verb]("/proc/new")
    with unread(free=3), pytest.raises(InputError, match="3 B free: make room"):
        LIBRARY[verb]("new")


@pytest.mark.parametrize(
    "line",
    [
        ("run", "x.zarr", "x.zarr", "new", "--transpose-b", "--transform-a", "center=k"),
        ("gram", "x.zarr", "new", "--transform", "center=k"),
        ("corr", "x.zarr", "new"),
        ("corr", "x.zarr", "new", "--constant", "drop"),
        ("corr", "x.zarr", "new", "--topk", "3"),
        ("similarity", "x.zarr", "new", "--topk", "3"),
        ("grm", "g.bed", "new"),
    ],
)
def test_a_timeline_without_permission_is_refused_before_anything_is_read(
    here: Path, line: tuple[str, ...]
) -> None:
    before = contents(here)
    with unread():
        done = command(*line, "--backend", "host", "--timeline", "/proc/log")
    assert (done.code, "the timeline cannot be written to /proc/log" in done.err) == (EXIT_USAGE, True)
    assert contents(here) == before


@pytest.mark.parametrize("kind", ["html", "svg", "png", "trace"])
def test_exports_are_refused_before_a_timeline_is_read(kind: str) -> None:
    """The timeline does not exist, and the job has no server. Neither is needed."""
    for what in (("no.jsonl",), ("--job", "last", "--service", "/nowhere")):
        done = command("report", *what, f"--{kind}", "/proc/picture")
        assert (done.code, f"cannot write --{kind} /proc/picture" in done.err) == (EXIT_USAGE, True), done.err
