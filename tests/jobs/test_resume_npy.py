"""A C in one file is resumed only from what its run has written there, and without a journal not at all."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.jobs.journal import read
from tests.support.command import run
from tests.support.plink import genotypes, write_bed
from tests.support.suite import each_value
from tests.support.unfinished_runs import TILE, A, B, C, failing_after, store_operands, unfinished

DTYPES = ("float64", "float32", "complex64", "float16", ">f8", "<i4")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store_operands()
    return tmp_path


def changed(path: Path, offset: int, flip: int = 1) -> None:
    """Change one byte of a file, counted from its end."""
    with path.open("r+b") as file:
        file.seek(-offset, 2)
        byte = file.read(1)[0] ^ flip
        file.seek(-offset, 2)
        file.write(bytes([byte]))


def begun(c: str, tiles: int, **options: Any) -> tuple[Any, Any]:
    """Leave an unfinished run, and return its operands."""
    dtype = options.pop("dtype", "float64")
    short = "int8" if dtype == "<i4" else dtype
    a, b = ((10 * x).astype(short) for x in (A, B))
    np.save("p.npy", a)
    np.save("q.npy", b)
    with failing_after(tiles), pytest.raises(ExecutionError):
        oocgemm.gemm("p.npy", "q.npy", c, tile="4x4x4", backend="host", **options)
    return "p.npy", "q.npy"


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("existing", ["", "C", "F"])
def test_changed_tiles_are_computed_again(dtype: str, existing: str) -> None:
    more: dict[str, Any] = {}
    if existing:
        stored = np.dtype(dtype)
        np.save("c.npy", np.asarray(C.astype(stored), order=existing))  # type: ignore[call-overload]
        more["overwrite"] = True
    a, b = begun("c.npy", 5, dtype=dtype, **more)
    data = Path("c.npy.oocgemm/data.npy") if not existing else Path("c.npy")
    record = read(Path("c.npy.oocgemm"))
    assert record is not None
    assert set(record.files) == record.done
    assert len(record.done) == 5
    mapped = np.load(data, mmap_mode="r+")
    done = min(record.done)
    mapped[4 * done[0] + 1, 4 * done[1] + 2] += 1
    mapped.flush()
    given: dict[str, Any] = {"tile": "4x4x4", "backend": "host"}
    found = oocgemm.gemm(a, b, "c.npy", resume=True, **given)
    assert len(found.plan.done) == 4
    np.testing.assert_array_equal(np.load("c.npy"), oocgemm.gemm(a, b, **given).out)


def test_unchanged_tiles_are_kept() -> None:
    a, b = begun("c.npy", 5)
    before = Path("c.npy.oocgemm/data.npy")
    shutil.copy(before, "copy")  # another modification time, and equal elements
    shutil.copy("copy", before)
    found = oocgemm.gemm(a, b, "c.npy", tile="4x4x4", backend="host", resume=True)
    assert len(found.plan.done) == 5


def test_the_command_finds_a_change_of_one_bit() -> None:
    unfinished("c.npy", tiles=9 - 1)
    changed(Path("c.npy.oocgemm/data.npy"), 8 * 12 * 12)  # the first element
    assert run("a", "b", "c.npy", *TILE, "--resume").code == 0
    assert run("a", "b", "d.npy", *TILE).code == 0
    np.testing.assert_array_equal(np.load("c.npy"), np.load("d.npy"))


def test_a_change_is_refused_if_the_old_c_is_needed() -> None:
    np.save("c.npy", C)
    unfinished("c.npy", "--beta", "0.5", tiles=3)
    np.save("backup.npy", C)
    changed(Path("c.npy"), 8 * 12 * 12)
    done = run("a", "b", "c.npy", *TILE, "--beta", "0.5", "--resume")
    assert "files of 1 of 3 finished tiles of C are missing or have changed" in done.err
    assert "restore C from a copy, remove its journal" in done.err
    shutil.copy("backup.npy", "c.npy")
    shutil.rmtree("c.npy.oocgemm")
    assert run("a", "b", "c.npy", *TILE, "--beta", "0.5").code == 0
    np.testing.assert_allclose(np.load("c.npy"), A @ B + 0.5 * C)


@pytest.mark.parametrize("name", ["g.grm.bin", "g.npy"])
def test_changed_relationships_are_computed_again(name: str) -> None:
    path = write_bed(Path("x.bed"), genotypes(np.random.default_rng(1), 60, 100))
    given: dict[str, Any] = {"backend": "host", "tile": "16x16x50", "uplo": "lower"}
    with failing_after(4), pytest.raises(ExecutionError):
        oocgemm.grm(path, name, **given)
    data = Path(f"{name}.oocgemm/data.npy")
    changed(data, data.stat().st_size - (130 if name.endswith("npy") else 2))
    assert len(oocgemm.grm(path, name, resume=True, **given).plan.done) == 3
    right = oocgemm.grm(path, f"r{name}", **given)
    del right
    assert Path(name).read_bytes() == Path(f"r{name}").read_bytes()


@each_value
@pytest.mark.parametrize("again", [(), ("--resume",)])
@pytest.mark.parametrize("name", ["c.npy", "new/c.npy"])
def test_a_lost_journal_is_named_with_a_remedy(name: str, again: tuple[str, ...]) -> None:
    unfinished(name)
    folder = Path(f"{name}.oocgemm")
    (folder / "journal").unlink()
    for _ in range(2):  # an attempt that is refused changes nothing
        done = run("a", "b", name, *TILE, *again)
        assert done.code == 2
        assert f"its journal in {folder.absolute()} is lost" in done.err
        assert "pass overwrite=True (--overwrite) to compute all of it again" in done.err
    with pytest.raises(InputError, match="is lost"):
        oocgemm.gemm("a", "b", name, tile="4x4x4", backend="host", resume=bool(again))
    assert run("a", "b", name, *TILE, *again, "--overwrite").code == 0
    np.testing.assert_allclose(np.load(name), A @ B)
    assert not folder.exists()


@pytest.mark.parametrize("c", ["c", "c.npy"])
def test_beta_is_not_applied_twice_without_a_journal(c: str) -> None:
    if c == "c":
        shutil.copytree("old", c)
    else:
        np.save(c, C)
    unfinished(c, "--beta", "0.5")
    folder = Path(f"{c}.oocgemm" if c.endswith(".npy") else f"{c}/.oocgemm")
    for name in ("journal", "count"):
        (folder / name).unlink()
    for more in ((), ("--resume",), ("--overwrite",)):
        done = run("a", "b", c, *TILE, "--beta", "0.5", *more)
        assert (done.code, "beta could be applied twice to some tiles: restore C" in done.err) == (2, True)
