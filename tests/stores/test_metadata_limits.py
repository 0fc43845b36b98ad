"""Metadata of any size is refused before it is read, so small jobs take no memory outside their budget."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import ObjectStore

import oocgemm
from oocgemm.errors import InputError
from oocgemm.stores import open_matrix
from oocgemm.stores.objects import Bucket
from tests.support import TOP
from tests.support.command import run
from tests.support.hdf5_files import whole
from tests.support.object_server import BUCKET, Proxy
from tests.support.suite import thinned

FILES = {"zarr.json": 3, ".zarray": 2, ".zattrs": 2, ".zgroup": 2, ".zmetadata": 2}
MIB = 1 << 20


def make(folder: Path, zarr_format: Any = 3) -> None:
    zarr.create_array(folder, data=np.ones((4, 4)), chunks=(2, 2), zarr_format=zarr_format)


def bloat(path: Path, size: int) -> None:
    """Let a metadata file have `size` bytes, with a valid document that has a large attribute."""
    document = json.loads(path.read_text()) if path.exists() else {}
    document = {"padding": ""} if path.name == ".zattrs" else document | {"padding": ""}
    document["padding"] = "x" * (size - len(json.dumps(document)))
    path.write_text(json.dumps(document))
    assert path.stat().st_size == size


@pytest.mark.parametrize("name", FILES)
def test_large_metadata_is_refused_with_its_size(tmp_path: Path, name: str) -> None:
    limit = 64 if name == ".zmetadata" else 1
    for operand in (tmp_path / "A", tmp_path / "B"):
        make(operand, FILES[name])
        bloat(operand / name, limit * MIB + 1)
    expected = rf"its metadata {re.escape(name)} has {limit}\S* MiB, and at most {limit} MiB are read: move"
    with pytest.raises(InputError, match=rf"A at .*{expected}"):
        oocgemm.matmul(str(tmp_path / "A"), np.eye(4))
    with pytest.raises(InputError, match=expected):
        open_matrix("A", f"file://{tmp_path}/A")
    with pytest.raises(InputError, match=rf"C at .*{expected}"):
        oocgemm.gemm(np.eye(4), np.eye(4), str(tmp_path / "B"), overwrite=True)
    done = run(tmp_path / "A", tmp_path / "B", tmp_path / "C")
    assert (done.code, re.search(expected, done.err) is not None) == (2, True)
    # The remedy.
    if name in ("zarr.json", ".zattrs"):
        make(tmp_path / "D", FILES[name])
        open_matrix("D", str(tmp_path / "D"))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_metadata_up_to_the_limit_is_read(tmp_path: Path, zarr_format: int) -> None:
    make(tmp_path / "A", zarr_format)
    array = zarr.open_array(tmp_path / "A", mode="r+")
    array.attrs["history"] = "x" * (MIB - 5000)
    np.testing.assert_array_equal(whole(open_matrix("A", str(tmp_path / "A"))), np.ones((4, 4)))


@pytest.mark.parametrize("name", thinned(("zarr.json", ".zattrs", ".npy"), ("zarr.json",)))
def test_large_metadata_takes_no_memory(tmp_path: Path, name: str) -> None:
    """A process whose address space has no room for the file refuses it."""
    place = tmp_path / "A"
    if name == ".npy":
        place = tmp_path / "A.npy"
        place.write_bytes(b"\x93NUMPY\x02\x00" + (900 << 20).to_bytes(4, "little"))
        with place.open("r+b") as file:
            file.truncate(901 << 20)
    else:
        make(place, FILES[name])
        with (place / name).open("r+b") as file:
            file.truncate(900 << 20)
    code = (
        "import sys; from oocgemm.stores import open_matrix; import oocgemm.stores.zarr_through\n"
        "try: open_matrix('A', sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        # The peak in kB since this program was started. That of getrusage is the larger one of the tests.
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    line = [sys.executable, "-c", code, str(place)]
    done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False, timeout=100)
    *message, peak = done.stdout.splitlines()
    assert "900" in message[0] or "943718400" in message[0], done.stdout + done.stderr
    assert int(peak) < 500 << 10


@pytest.mark.parametrize("name", ["zarr.json", ".zattrs"])
def test_large_metadata_of_objects_is_refused(s3: Proxy, tmp_path: Path, name: str) -> None:
    bucket = Bucket(f"s3://{BUCKET}/A.zarr")
    zarr_format: Any = FILES[name]
    zarr.create_array(
        ObjectStore(bucket.store),
        data=np.ones((4, 4)),
        chunks=(2, 2),
        zarr_format=zarr_format,
        overwrite=True,
    )
    for place in (f"s3://{BUCKET}/A.zarr", f"{s3.url}/{BUCKET}/A.zarr"):
        np.testing.assert_array_equal(whole(open_matrix("A", place)), np.ones((4, 4)))
    found = bucket.get(name)
    (tmp_path / name).write_bytes(b"{}" if found is None else found[0].tobytes())
    bloat(tmp_path / name, MIB + 1)
    bucket.put(name, np.frombuffer((tmp_path / name).read_bytes(), np.uint8))
    for place in (f"s3://{BUCKET}/A.zarr", f"{s3.url}/{BUCKET}/A.zarr"):
        with pytest.raises(InputError, match=rf"{re.escape(name)} has 1\S* MiB, and at most 1 MiB are read"):
            open_matrix("A", place)
    bucket.delete(list(bucket.listing()))
    bucket.put(".zgroup", np.frombuffer(b'{"zarr_format": 2}', np.uint8))
    with pytest.raises(InputError, match="is a zarr group, not an array"):
        open_matrix("A", f"s3://{BUCKET}/A.zarr")


@pytest.mark.parametrize("shape", [(-4, 3), (4, -3), (-4, -3), (-1, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_negative_extents_are_refused(tmp_path: Path, shape: tuple[int, int], order: str) -> None:
    path = tmp_path / "A.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": order == "F", "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(96))
    expected = rf"the shape {shape[0]} x {shape[1]}, with a negative extent: its metadata is damaged"
    with pytest.raises(InputError, match=f"A has {expected}"):
        oocgemm.matmul(str(path), np.eye(3))
    np.save(tmp_path / "B.npy", np.eye(3))
    done = run(path, tmp_path / "B.npy", tmp_path / "C.npy")
    assert (done.code, re.search(expected, done.err) is not None) == (2, True)
    for zarr_format, name in ((2, ".zarray"), (3, "zarr.json")):
        folder = tmp_path / f"A{zarr_format}"
        make(folder, zarr_format)
        document = json.loads((folder / name).read_text()) | {"shape": shape}
        (folder / name).write_text(json.dumps(document))
        with pytest.raises(InputError, match=r"negative"):
            open_matrix("A", str(folder))
