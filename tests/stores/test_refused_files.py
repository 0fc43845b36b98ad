"""Every reader refuses what is not a regular file, and in a job of the service links out of the root."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from oocgemm.errors import OocGemmError
from oocgemm.stores import files
from oocgemm.stores.opening import open_matrix

EXTENT, CHUNK = 32, 16
VALUES = np.random.default_rng(3).integers(-8, 9, (EXTENT, EXTENT)).astype(np.float64)


def _zarr(**options: Any) -> Callable[[Path], tuple[Path, Path]]:
    """Return a function that stores an array in a folder, and returns its path and that of its chunk."""

    def store(folder: Path) -> tuple[Path, Path]:
        path, plain = folder / "A.zarr", {"chunks": (CHUNK, CHUNK), "compressors": None, "dtype": "f8"}
        made = zarr.create_array(path, shape=VALUES.shape, **plain | options)
        made[:] = VALUES
        names = [f"{path}/{name}" for name in ("c/0/0", "0.0", "0/0") if (path / name).exists()]
        return path, Path(names[0])

    return store


def _beside(suffix: str) -> Callable[[Path], tuple[Path, Path]]:
    def store(folder: Path) -> tuple[Path, Path]:
        path = folder / "A.bed"
        path.write_bytes(b"\x6c\x1b\x01" + bytes([0b11100100] * EXTENT * EXTENT)[: EXTENT * EXTENT // 4])
        path.with_suffix(".bim").write_text("1 v 0 1 A C\n" * EXTENT)
        path.with_suffix(".fam").write_text("f i 0 0 0 -9\n" * EXTENT)
        return path, path.with_suffix(suffix)

    return store


def _npy(folder: Path) -> tuple[Path, Path]:
    np.save(folder / "A.npy", VALUES)
    return folder / "A.npy", folder / "A.npy"


def _grm(folder: Path) -> tuple[Path, Path]:
    path = folder / "A.grm.bin"
    VALUES[np.tril_indices(EXTENT)].astype("f4").tofile(path)
    return path, path


def _hdf5(folder: Path) -> tuple[Path, Path]:
    with h5py.File(folder / "A.h5", "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(CHUNK, CHUNK))
    return Path(f"{folder}/A.h5::/x"), folder / "A.h5"


def _metadata(name: str, zarr_format: int) -> Callable[[Path], tuple[Path, Path]]:
    def store(folder: Path) -> tuple[Path, Path]:
        path, _ = _zarr(zarr_format=zarr_format)(folder)
        if not (path / name).exists():
            (path / name).write_text("{}")
        return path, path / name

    return store


def _delta() -> Any:
    from numcodecs import Delta

    return Delta(dtype="f8")


READERS = {
    "zarr, raw": _zarr(),
    "zarr, raw, large": _zarr(chunks=(EXTENT, EXTENT), shards=None),
    "zarr, raw, big-endian": _zarr(dtype=">f8", zarr_format=2),
    "zarr, zstd": _zarr(compressors="auto"),
    "zarr, shards": _zarr(chunks=(8, 8), shards=(CHUNK, CHUNK)),
    "zarr, v2, nested": _zarr(zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"}),
    "zarr-python": _zarr(zarr_format=2, filters=[_delta()]),
    "zarr, raw, in Python": _zarr(),
    "npy": _npy,
    "npy, in Python": _npy,
    "grm": _grm,
    "hdf5": _hdf5,
    **{f"bed, {suffix}": _beside(suffix) for suffix in (".bed", ".bim", ".fam")},
    "zarr.json": _metadata("zarr.json", 3),
    ".zarray": _metadata(".zarray", 2),
    ".zattrs": _metadata(".zattrs", 2),
    ".zgroup": _metadata(".zgroup", 2),
}
each_reader = pytest.mark.parametrize("reader", READERS)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled code, Python reads."""
    reader = request.getfixturevalue("reader") if "reader" in request.fixturenames else ""
    if "in Python" in reader:
        monkeypatch.setattr(files, "compiled", lambda: None)


@pytest.fixture
def _confined(place: Path) -> Iterator[None]:
    files.confine([str(place / "root")])
    yield
    files.confine([])


def _read(path: Path) -> Any:
    matrix = open_matrix("A", path)
    out = np.empty(matrix.shape, matrix.dtype)
    matrix.read((0, matrix.shape[0]), (0, matrix.shape[1]), out)
    return out


def _fifo(path: Path, place: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, place: Path) -> None:
    os.chdir(path.parent)  # the path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def _folder(path: Path, place: Path) -> None:
    path.symlink_to(place / "outside")


def _to_fifo(path: Path, place: Path) -> None:
    os.mkfifo(place / "root/pipe")
    path.symlink_to(place / "root/pipe")


IRREGULAR: dict[str, Callable[[Path, Path], object]] = {
    "a named pipe": _fifo,
    "a link to a named pipe": _to_fifo,
    "a socket": _socket,
    "a link to a folder": _folder,
    "a link to a device": lambda path, place: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path, place: path.symlink_to(place / "absent"),
    "a link to the environment": lambda path, place: path.symlink_to("/proc/self/environ"),
    "a link to a file of /sys": lambda path, place: path.symlink_to("/sys/devices/system/cpu/online"),
}


@each_reader
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_regular_file_is_refused_at_once(
    place: Path, reader: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "a link to a folder" and reader in (".zattrs", ".zgroup"):
        pytest.skip("a folder of this name has no meaning")
    monkeypatch.chdir(place)
    path, file = READERS[reader](place / "root")
    file.unlink()
    IRREGULAR[kind](file, place)
    with pytest.raises((OocGemmError, OSError), match=f"{file.name}|no zarr array"):
        _read(path)


def _linked(kind: str, file: Path, place: Path) -> None:
    """Replace a file by a link to another place of it."""
    inside, outside = place / "root/moved", place / "outside/moved"
    target = inside if "inside" in kind else outside
    file.rename(target)
    if kind.startswith("hard"):
        os.link(target, file)
    elif kind.startswith("relative"):
        file.symlink_to(os.path.relpath(target, file.parent))
    elif kind.startswith("folder"):
        folder = place / "outside/folder"
        target.rename(file)
        file.parent.rename(folder)
        file.parent.symlink_to(folder)
    else:
        file.symlink_to(target)


INSIDE = ("link inside", "relative link inside", "hard link")
OUTSIDE = ("link", "relative link")


@each_reader
@pytest.mark.parametrize("kind", [*INSIDE, *OUTSIDE])
def test_a_local_run_follows_the_links_of_its_user(place: Path, reader: str, kind: str) -> None:
    path, file = READERS[reader](place / "root")
    right = _read(path)
    _linked(kind, file, place)
    np.testing.assert_array_equal(_read(path), right)


@each_reader
@pytest.mark.usefixtures("_confined")
@pytest.mark.parametrize("kind", INSIDE)
def test_a_job_follows_links_inside_the_root(place: Path, reader: str, kind: str) -> None:
    path, file = READERS[reader](place / "root")
    right = _read(path)
    _linked(kind, file, place)
    np.testing.assert_array_equal(_read(path), right)


@each_reader
@pytest.mark.usefixtures("_confined")
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_job_follows_no_link_out_of_the_root(place: Path, reader: str, kind: str) -> None:
    path, file = READERS[reader](place / "root")
    _linked(kind, file, place)
    with pytest.raises((OocGemmError, OSError), match="symbolic link out of the root"):
        _read(path)


@pytest.mark.usefixtures("_confined")
@pytest.mark.parametrize(
    "reader", [each for each in READERS if each.startswith("zarr") and "json" not in each]
)
def test_a_job_follows_no_folder_of_chunks_out_of_the_root(place: Path, reader: str) -> None:
    path, file = READERS[reader](place / "root")
    if file.parent == path:
        pytest.skip("the chunks have no folder of their own")
    _linked("folder", file, place)
    with pytest.raises((OocGemmError, OSError), match="symbolic link out of the root"):
        _read(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["journal", "count"])
def test_the_journal_of_c_must_be_a_regular_file(place: Path, name: str) -> None:
    from oocgemm import gemm

    np.save(place / "A.npy", VALUES)
    (place / "C.npy.oocgemm").mkdir()
    os.mkfifo(place / f"C.npy.oocgemm/{name}")
    with pytest.raises(OocGemmError, match=f"{name}.*named pipe"):
        gemm(place / "A.npy", place / "A.npy", place / "C.npy", resume=True, backend="host")
