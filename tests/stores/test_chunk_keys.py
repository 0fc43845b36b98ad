"""A zarr array whose metadata states other keys than its chunks have is refused, not read as fill values."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore, ObjectStore, ZipStore

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores import open_matrix
from oocgemm.stores.objects import Bucket
from tests.support.command import run
from tests.support.hdf5_files import whole
from tests.support.object_server import BUCKET, Proxy
from tests.support.suite import thinned

VALUES = np.random.default_rng(0).integers(1, 50, (10, 14)).astype("f8")
V3 = (("default", "/"), ("default", "."), ("v2", "/"), ("v2", "."))
V2 = V3[2:]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"zarr_format": 3, "compressors": None},
    "zstd": {"zarr_format": 3, "compressors": ZstdCodec()},
    "sharded": {"zarr_format": 3, "shards": (8, 10)},
    "format 2": {"zarr_format": 2, "compressors": None},
    "format 2, read by zarr": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")]},
}
MISMATCH = r"A at .* has no chunk whose key matches its metadata, as .* does, but it has the chunk .*"
CASES = [
    (kind, stored, stated)
    for kind, options in KINDS.items()
    for stored, stated in product(V2 if options["zarr_format"] == 2 else V3, repeat=2)
]


def make(store: Any, kind: str, keys: tuple[str, str], parts: tuple[Any, ...] = (np.s_[:, :],)) -> None:
    """Create an array with keys of one encoding, and write parts of it."""
    array = zarr.create_array(
        store=store,
        shape=VALUES.shape,
        dtype="f8",
        chunks=(4, 5),
        fill_value=0,
        chunk_key_encoding={"name": keys[0], "separator": keys[1]},
        **KINDS[kind],
    )
    for part in parts:
        array[part] = VALUES[part]


def restate(folder: Path, keys: tuple[str, str]) -> None:
    """Change the encoding of keys in the metadata. The encoding ("v2", ".") may be left out in format 2."""
    if (folder / "zarr.json").exists():
        document = json.loads((folder / "zarr.json").read_text())
        document["chunk_key_encoding"] = {"name": keys[0], "configuration": {"separator": keys[1]}}
        (folder / "zarr.json").write_text(json.dumps(document, indent=2))
        return
    document = json.loads((folder / ".zarray").read_text())
    del document["dimension_separator"]
    if keys[1] != ".":
        document["dimension_separator"] = keys[1]
    (folder / ".zarray").write_text(json.dumps(document, indent=4))


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize(("kind", "stored", "stated"), CASES)
@pytest.mark.parametrize("opened_by", thinned(["path", "zarr"], ["path"]))
def test_keys_that_do_not_match_are_refused(
    tmp_path: Path, kind: str, stored: tuple[str, str], stated: tuple[str, str], opened_by: str
) -> None:
    folder = tmp_path / "A.zarr"
    for parts in ((np.s_[:, :],), (np.s_[4:8, 5:10],), ()):
        make(folder, kind, stored, parts)
        restate(folder, stated)
        operand: Any = str(folder) if opened_by == "path" else zarr.open_array(folder, mode="r")
        expected = np.zeros_like(VALUES)
        for part in parts:
            expected[part] = VALUES[part]
        if parts and stored != stated:
            with pytest.raises(InputError, match=MISMATCH) as caught:
                open_matrix("A", operand)
            # Follow the remedy.
            remedy = re.search(r'set "(\w+)": (.*) in (\S+)$', str(caught.value))
            assert remedy is not None
            document = json.loads((folder / remedy[3]).read_text())
            document[remedy[1]] = json.loads(remedy[2])
            (folder / remedy[3]).write_text(json.dumps(document))
            operand = str(folder)
        np.testing.assert_array_equal(whole(open_matrix("A", operand)), expected)
        shutil.rmtree(folder)


def test_products_and_the_command_line_refuse_such_operands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("A", "format 2"), ("C", "plain")):
        make(f"{name}.zarr", kind, ("v2", "/"))
        restate(Path(f"{name}.zarr"), ("v2", "."))
    with pytest.raises(InputError, match=MISMATCH):
        oocgemm.matmul("A.zarr", np.eye(14))
    with pytest.raises(InputError, match=MISMATCH):
        oocgemm.gemm("A.zarr", np.eye(14), "D.zarr")
    np.save("B.npy", np.eye(14))
    done = run("A.zarr", "B.npy", "D.zarr")
    assert (done.code, 'set "dimension_separator": "/" in .zarray' in done.err) == (2, True)
    # C's old elements would be read as zeros.
    with pytest.raises(InputError, match=r"C at .* has no chunk whose key matches"):
        oocgemm.gemm(VALUES @ np.eye(14), np.eye(14), "C.zarr", beta=1.0)


def test_other_files_beside_the_chunks_are_ignored(tmp_path: Path) -> None:
    make(tmp_path / "A.zarr", "plain", ("default", "/"), ())
    for name in ("notes", "c0", "0.0.partial", ".hidden"):
        (tmp_path / "A.zarr" / name).write_bytes(b"1")
    (tmp_path / "A.zarr" / "7").mkdir()
    assert not whole(open_matrix("A", str(tmp_path / "A.zarr"))).any()
    # No encoding of keys explains one of three dimensions.
    (tmp_path / "A.zarr" / "0.0.0").write_bytes(b"1")
    with pytest.raises(
        InputError, match=r"it has the chunk 0\.0\.0: correct the metadata, or copy the array"
    ):
        open_matrix("A", str(tmp_path / "A.zarr"))


def test_a_chunk_with_the_right_key_suffices(tmp_path: Path) -> None:
    make(tmp_path / "A.zarr", "plain", ("default", "/"), (np.s_[8:, 10:],))
    (tmp_path / "A.zarr" / "0.0").write_bytes(b"1")
    assert whole(open_matrix("A", str(tmp_path / "A.zarr")))[9, 13] == VALUES[9, 13]


def test_folders_that_link_to_themselves_are_not_followed_forever(tmp_path: Path) -> None:
    make(tmp_path / "A.zarr", "plain", ("default", "/"), ())
    for name in ("c", "0", "1"):
        (tmp_path / "A.zarr" / name).symlink_to(".")
    with pytest.raises((InputError, ExecutionError, IsADirectoryError)):
        whole(open_matrix("A", str(tmp_path / "A.zarr")))


@pytest.mark.parametrize("store", ["memory", "zip", "group"])
@pytest.mark.parametrize("written", [True, False])
def test_arrays_in_other_stores_of_zarr_are_checked(tmp_path: Path, store: str, written: bool) -> None:
    parts = (np.s_[4:8, 5:10],) if written else ()
    folder = tmp_path / "made"
    make(folder / "x", "format 2", V2[0], parts)
    restate(folder / "x", V2[1])
    if store == "group":
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        array: Any = zarr.open_group(LocalStore(folder), mode="r")["x"]
    elif store == "memory":
        files = {str(each.relative_to(folder)): each for each in folder.rglob("*") if each.is_file()}
        content: Any = {
            name: zarr.core.buffer.cpu.Buffer.from_bytes(each.read_bytes()) for name, each in files.items()
        }
        array = zarr.open_array(MemoryStore(content), path="x", mode="r")
    else:
        shutil.make_archive(str(tmp_path / "made"), "zip", folder)
        array = zarr.open_array(ZipStore(tmp_path / "made.zip", mode="r"), path="x", mode="r")
    if written:
        with pytest.raises(InputError, match=MISMATCH):
            open_matrix("A", array)
    else:
        assert not whole(open_matrix("A", array)).any()


@pytest.mark.parametrize(
    "kind", thinned(["plain", "sharded", "format 2", "format 2, read by zarr"], ["format 2"])
)
def test_arrays_in_object_stores_and_on_web_servers_are_checked(s3: Proxy, tmp_path: Path, kind: str) -> None:
    url, web = f"s3://{BUCKET}/A.zarr", f"{s3.url}/{BUCKET}/A.zarr"
    metadata = "zarr.json" if KINDS[kind]["zarr_format"] == 3 else ".zarray"
    bucket = Bucket(url)
    for parts, stated in product([(np.s_[:, :],), (np.s_[:4, :5],), ()], [V2[0], V2[1]]):
        bucket.delete(list(bucket.listing()))
        make(ObjectStore(bucket.store), kind, V2[0], parts)
        (tmp_path / metadata).write_bytes(bucket.get(metadata)[0].tobytes())  # type: ignore[index]
        restate(tmp_path, stated)
        bucket.put(metadata, np.frombuffer((tmp_path / metadata).read_bytes(), np.uint8))
        for place in (url, web):
            if parts and stated != V2[0]:
                with pytest.raises(InputError, match=MISMATCH):
                    open_matrix("A", place)
                continue
            expected = np.zeros_like(VALUES)
            for part in parts:
                expected[part] = VALUES[part]
            np.testing.assert_array_equal(whole(open_matrix("A", place)), expected)


def test_a_bucket_that_may_not_be_listed_is_read(s3: Proxy) -> None:
    """Only the keys of the first chunk are tried there."""
    bucket = Bucket(f"s3://{BUCKET}/A.zarr")
    bucket.delete(list(bucket.listing()))
    make(ObjectStore(bucket.store), "plain", V3[0])
    s3.faults = lambda method, path: 403 if "list-type" in path else None
    np.testing.assert_array_equal(whole(open_matrix("A", f"s3://{BUCKET}/A.zarr")), VALUES)
