"""Damaged, missing and vanishing files end a run with an error that names them.

Nothing is left behind.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import ExecutionError
from oocgemm.cli.process import EXIT_FAILED
from oocgemm.jobs.journal import JOURNAL
from oocgemm.planning import Plan
from oocgemm.timeline import Span
from tests.support.faults import nothing_left
from tests.support.faulty_runs import (
    CHUNK,
    DIRECT,
    PRODUCT,
    STORES,
    TILE,
    A,
    B,
    M,
    N,
    assert_not_whole,
    chunk,
    failure,
    multiply,
    once_planned,
    store,
)
from tests.support.suite import each_value, slow, thinned

pytestmark = pytest.mark.usefixtures("zarr_has_its_threads", "retries_are_soon")


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def a(tmp_path: Path, kind: str) -> Path:
    """Store A as the parameter `kind` says, and return its path."""
    return store(tmp_path / "A", kind)


def _cut(place: Path) -> None:
    os.truncate(place, place.stat().st_size // 2)


def _garbage(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 255
    content[:4] = b"\xff" * 4
    place.write_bytes(content)


def _folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def _no_end(place: Path) -> None:
    place.unlink()
    place.symlink_to(place)


DAMAGES = (_cut, _garbage, _folder, _no_end)
# Damage that cannot be noticed. Raw chunks have no checksum, and zarr treats a folder in the place of a chunk
# as a missing chunk.
UNSEEN = {("raw", _garbage), ("filtered", _folder)}
# Each damage, and each way of reading, at least once.
QUICK = [("raw", _cut), ("raw", _folder), ("raw", _no_end), ("zstd", _garbage), ("blosc", _cut)]
QUICK += [("crc32c", _garbage), ("shards", _garbage), ("filtered", _cut)]
SEEN = [(kind, damage) for kind in STORES for damage in DAMAGES if (kind, damage) not in UNSEEN]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in SEEN],
    indirect=["kind"],
)
@pytest.mark.parametrize("when", [*slow(("before",)), "once planned"])
def test_a_damaged_file_is_named(
    tmp_path: Path, a: Path, kind: str, damage: Callable[[Path], None], when: str
) -> None:
    if (kind, damage) == ("shards", _garbage):
        damage = _garbage_index
    options = {}
    if when == "before":
        damage(chunk(a))
    else:
        options["progress"] = once_planned(lambda: damage(chunk(a)))
    said = failure(tmp_path, a, **options)
    assert "of tile (1, " in said
    assert "A[20:" in said
    assert chunk_name(a) in said
    if (kind, damage) == ("shards", _garbage_index):
        assert (
            "is a shard whose index cannot be read (its checksum (crc32c) does not match its content)" in said
        )


def _garbage_index(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[-10] ^= 255
    place.write_bytes(content)


def chunk_name(a: Path) -> str:
    if (a / ".zarray").exists():
        return "2.1 in "
    return "c/1/1" if (a / "c" / "1").is_dir() and not (a / "c" / "2").is_dir() else "c/2/1"


@pytest.mark.parametrize("kind", thinned(DIRECT, ("raw", "shards")), indirect=True)
@pytest.mark.parametrize("part", ["chunk", *slow(("row",), ("all",))])
def test_a_chunk_deleted_during_a_run_is_not_the_fill_value(tmp_path: Path, a: Path, part: str) -> None:
    place = {"chunk": chunk(a), "row": chunk(a).parent, "all": a}[part]

    def vanish() -> None:
        place.unlink() if part == "chunk" else shutil.rmtree(place)

    said = failure(tmp_path, a, progress=once_planned(vanish))
    assert "is missing in" in said
    assert str(a) in said


@pytest.mark.parametrize("kind", thinned(DIRECT, ("raw", "shards")), indirect=True)
def test_a_chunk_that_has_never_been_there_is_the_fill_value(tmp_path: Path, a: Path) -> None:
    chunk(a).unlink()
    expected = zarr.open_array(a)[:] @ B
    np.testing.assert_array_equal(multiply(tmp_path, a).out[:], expected)


def test_chunks_that_a_run_adds_to_c_are_no_vanished_chunks(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "C", shape=(M, N), dtype="f8", chunks=(CHUNK, CHUNK), compressors=None)
    result = multiply(tmp_path, A, beta=1)
    np.testing.assert_array_equal(result.out[:], PRODUCT)


@each_value
@pytest.mark.parametrize("again", [False, True], ids=["", "and is made by another run"])
@pytest.mark.parametrize("moment", ["begun", "written", "recorded"])
def test_a_c_that_vanishes_under_a_run_is_not_half_made_again(
    tmp_path: Path, moment: str, again: bool
) -> None:
    a, b = store(tmp_path / "A", "raw"), store(tmp_path / "B", "raw", B)
    c, written = tmp_path / "C", 0

    def vanish() -> None:
        c.rename(tmp_path / "away")
        if again:
            multiply(tmp_path, a, b, compressor="zstd")

    def progress(plan: Plan) -> Callable[[Span], None]:
        if moment == "begun":
            vanish()
            raise OSError(errno.ENOENT, "and the run fails", str(c))
        return see

    def see(span: Span) -> None:
        nonlocal written
        if span.kind == "write":
            written += span.bytes
            if written == PRODUCT.nbytes:
                while moment == "recorded" and (c / ".oocgemm" / JOURNAL).read_bytes().count(b"done") < 6:
                    time.sleep(0.001)
                vanish()

    with nothing_left(tmp_path):
        try:
            multiply(tmp_path, a, b, compressor="zstd", progress=progress)
        except ExecutionError as error:
            said = str(error)
    assert re.search(r"cannot be (made durable|written to the disk): \[Errno 2\]", said)
    assert str(c) in said
    assert c.exists() == again
    if again:
        assert multiply(tmp_path, a, b, resume=True).plan.steps == 0


@pytest.mark.parametrize(("name", "beta"), [("A", 1), *slow(("B", 1)), ("C", 1), ("C", 0)])
def test_a_mapped_file_truncated_during_a_run_is_an_error(tmp_path: Path, name: str, beta: int) -> None:
    for place, values in (("A", A), ("B", B), ("C", PRODUCT)):
        np.save(tmp_path / f"{place}.npy", values)
    operands = [tmp_path / f"{place}.npy" for place in "ABC"]

    def cut() -> None:
        os.truncate(tmp_path / f"{name}.npy", 512)

    options: dict[str, Any] = {"beta": beta, "overwrite": True, "backend": "host", "tile": TILE}
    with nothing_left(tmp_path):
        try:
            oocgemm.gemm(*operands, **options, progress=once_planned(cut))
        except ExecutionError as error:
            said = str(error)
    assert f"{'reading' if beta else 'writing'} {name}[0:" in said
    assert "truncated from" in said


# The command, run as a process.


def test_the_command_ends_in_one_line(tmp_path: Path) -> None:
    a, b = store(tmp_path / "A", "zstd"), store(tmp_path / "B", "raw", B)
    _garbage(chunk(a))
    command = [
        sys.executable,
        "-m",
        "oocgemm",
        "run",
        a,
        b,
        tmp_path / "C",
        "--backend",
        "host",
        "--tile",
        TILE,
    ]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (EXIT_FAILED, "", 1), done.stderr
    assert "A[20:" in done.stderr
    assert "chunk c/2/1" in done.stderr
    assert_not_whole(tmp_path / "C")
