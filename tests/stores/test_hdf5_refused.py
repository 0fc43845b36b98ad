"""HDF5 files and datasets that cannot be operands are refused. The error says what to do."""

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

import oocgemm
from oocgemm import InputError
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.errors import ExecutionError
from tests.jobs.test_remedies import obeyed
from tests.support.command import run
from tests.support.hdf5_files import opened, write
from tests.support.suite import each_value

A = np.random.default_rng(0).integers(0, 3, (30, 20)).astype("f4")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(address: str) -> str:
    """Return the text of the error. The command must print the same text."""
    with pytest.raises(InputError) as raised:
        opened(address)
    said = str(raised.value)
    done = run(address, address, "C")
    assert (done.code, done.out) == (EXIT_USAGE, "")
    assert done.err.replace("Error: ", "") == " ".join(said.splitlines()) + "\n"
    return said


def test_a_file_without_a_dataset_lists_its_datasets() -> None:
    with h5py.File("a.h5", "w") as file:
        file["layers/one"], file["two"], file["vector"] = A, A.astype("f8"), A[0]
        file["text"] = np.array([[b"x"]])
    listed = "pass one of a.h5::/layers/one (30 x 20 float32), a.h5::/two (30 x 20 float64)"
    for address in ("a.h5", "a.h5::", "a.h5::/"):
        assert refusal(address) == f"A: a.h5 is an HDF5 file, which can contain many arrays: {listed}"
    assert refusal("a.h5::/three") == f"A: there is no dataset /three in a.h5: {listed}"
    assert refusal("a.h5::/two/x") == f"A: there is no dataset /two/x in a.h5: {listed}"
    assert refusal("a.h5::layers") == f"A: a.h5::layers is a group, not a dataset: {listed}"
    assert refusal("a.h5::/x/../two") == f"A: '/x/../two' is not the name of a dataset: {listed}"
    Path("a.h5").rename("unusual")
    assert refusal("unusual").startswith(
        "A: unusual is an HDF5 file, which can contain many arrays: pass one"
    )
    np.testing.assert_array_equal(oocgemm.matmul("unusual::/two", A.T.astype("f8"), backend="host"), A @ A.T)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.float32(3), "A has 0 dimensions"),
        (A[0], "A has 1 dimensions, a matrix has 2: reshape it"),
        (
            A.reshape(3, 10, 20),
            "A has 3 dimensions (3 x 10 x 20), a matrix has 2: fold them, such as oocgemm.as_matrix(A, ",
        ),
        (h5py.Empty("f4"), "is empty: it has no elements and no shape"),
        (A.astype("S4"), "its elements are not numbers"),
        (np.zeros((2, 2), [("x", "f4"), ("y", "f4"), ("z", "i4")]), "its elements are not numbers"),
    ],
)
def test_arrays_that_are_no_matrices_are_refused(values: Any, message: str) -> None:
    assert message in refusal(write(Path("a.h5"), values))


@each_value
@pytest.mark.parametrize("dtype", ["<u8", ">u8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (7, 20), "compression": "gzip"}])
def test_the_command_that_converts_a_dataset_works(dtype: str, options: dict[str, Any]) -> None:
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("x y", data=A.astype(dtype), **options)
    with pytest.raises(InputError) as raised:
        oocgemm.matmul("a.h5::/x y", A.T, backend="host")
    made, b = obeyed(str(raised.value), "a.h5::/x y", A.T)
    assert made.startswith("a-float64")
    values = A.astype(dtype).astype(made[2:-5])
    np.testing.assert_array_equal(oocgemm.matmul(made, b, backend="host"), values @ A.T.astype(values.dtype))


def test_elements_in_other_files_are_refused() -> None:
    write(Path("a.h5"), A)
    layout = h5py.VirtualLayout(A.shape, "f4")
    layout[...] = h5py.VirtualSource("a.h5", "x", A.shape)
    with h5py.File("b.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", A.shape, "f4", external=[("raw", 0, A.nbytes)])
        file["link"] = h5py.ExternalLink("a.h5", "/x")
        file["group/to"] = h5py.SoftLink("/link")
        file["loop"] = h5py.SoftLink("/loop")
        file["dangling"] = h5py.SoftLink("nothing")
        file["own"], file["group/own"] = A, h5py.SoftLink("/own")
    copied = "copy it into a dataset of its own, with h5py"
    assert f"has its elements in other datasets (it is virtual): {copied}" in refusal("b.h5::virtual")
    assert f"has its elements in another file: {copied}" in refusal("b.h5::external")
    for link in ("/link", "group/to"):
        assert f"b.h5::{link} is a link to another file: pass a.h5::/x" in refusal(f"b.h5::{link}")
    assert "has too many links" in refusal("b.h5::loop")
    assert "there is no dataset dangling" in refusal("b.h5::dangling")
    np.testing.assert_array_equal(oocgemm.matmul("b.h5::group/own", A.T, backend="host"), A @ A.T)


WRITER = """
import h5py, sys
file = h5py.File("a.h5", "r+", **eval(sys.argv[1]))
file["y"] = 1
file.flush()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("options", ["{}", "{'libver': 'latest'}"])
def test_a_file_that_a_process_writes_to_is_refused(options: str) -> None:
    with h5py.File("a.h5", "w", **eval(options)) as file:
        file["x"] = A
    writer = [sys.executable, "-c", WRITER, options]
    with subprocess.Popen(writer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert re.search("is open in a process that writes to it: close it there", refusal("a.h5::/x"))
        process.kill()
    if "latest" in options:  # the killed writer left a mark
        said = refusal("a.h5::/x")
        assert "is marked as open for writing" in said
        assert said.endswith("run h5clear --status a.h5")


def test_a_file_that_this_process_writes_to_is_refused() -> None:
    with h5py.File("a.h5", "w") as file:
        file["x"] = A
        assert "is open for writing in this process: close that h5py.File first" in refusal("a.h5::/x")
    opened("a.h5::/x")


def test_a_file_that_changes_after_it_was_opened_is_an_error() -> None:
    matrix, out = opened(write(Path("a.h5"), A, chunks=(10, 10))), np.empty_like(A)
    matrix.read((0, 30), (0, 20), out)
    with h5py.File("a.h5", "r+") as file:
        file["y"] = A
    with pytest.raises(
        ExecutionError, match=r"a\.h5 was changed since it was opened: do not write to operand"
    ):
        matrix.read((0, 30), (0, 20), out)


def test_files_of_other_formats_are_refused() -> None:
    Path("a.h5").write_bytes(b"no")
    assert refusal("a.h5::/x") == "A: a.h5 is not an HDF5 file"
    assert refusal("a.h5") == "A: a.h5 is not an HDF5 file"
    Path("a.nc").write_bytes(b"CDF\x02" + bytes(100))
    assert "convert it by nccopy -k nc4 a.nc a.nc4 and pass a.nc4::NAME" in refusal("a.nc::/x")
    Path("a.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(600))
    assert refusal("a.mat") == "A: a.mat is not an HDF5 file: save it in MATLAB with the option -v7.3"
    assert refusal("b.h5::/x") == "A: there is nothing at b.h5"
    assert "s3://bucket/b.h5 is a URL, and HDF5 files are read from local disks" in refusal(
        "s3://bucket/b.h5::x"
    )


@pytest.mark.parametrize("options", [{}, {"chunks": (10, 10)}, {"chunks": (10, 10), "compression": "gzip"}])
def test_a_truncated_file_is_an_error(options: dict[str, Any]) -> None:
    address = write(Path("a.h5"), np.random.default_rng(1).random((300, 200)), **options)
    content = Path("a.h5").read_bytes()
    for size in range(0, len(content), len(content) // 8):
        Path("a.h5").write_bytes(content[:size])
        assert re.search("truncated|damaged|is not an HDF5 file", refusal(address))


def test_a_chunk_beyond_the_end_of_the_file_is_an_error() -> None:
    """Cut the file, and store the new size in its superblock, which h5py compares with the real one."""
    address = write(Path("a.h5"), np.ones((300, 200)), chunks=(100, 100))
    content = bytearray(Path("a.h5").read_bytes())
    for size, message in ((len(content) - 1000, "is truncated: its chunk at .* ends at byte"),):
        content[40:48] = size.to_bytes(8, "little")
        Path("a.h5").write_bytes(content[:size])
        assert re.search(message, refusal(address))


@pytest.mark.parametrize("itemsize", [0, 256, 1 << 31])
def test_parameters_of_filters_that_make_no_sense_are_refused(itemsize: int) -> None:
    address = write(Path("a.h5"), A, chunks=(10, 10), shuffle=True)
    content = Path("a.h5").read_bytes()
    # The number of the filter, the length of its name, its flags, the number of its parameters
    head = struct.pack("<4H", 2, 8, 1, 1) + b"shuffle\0"
    assert content.count(head) == 1
    at = content.index(head) + len(head)
    Path("a.h5").write_bytes(content[:at] + struct.pack("<I", itemsize) + content[at + 4 :])
    assert (
        f"the parameters ({itemsize},) of its filter shuffle are not valid: the file is damaged"
        in refusal(address)
    )


def test_a_filter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("a.h5"), A, chunks=(10, 10), **hdf5plugin.Blosc2())
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda number: False)
    assert re.search(
        r"needs the filter blosc2 \(number 32026\), .*: pip install hdf5plugin", refusal("a.h5::x")
    )


def test_without_h5py_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("a.h5"), A)
    monkeypatch.delitem(sys.modules, "oocgemm.stores.hdf5_opening", raising=False)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "pip install 'oocgemm[hdf5]'" in refusal("a.h5::x")


def test_a_result_cannot_be_a_dataset() -> None:
    address = write(Path("a.h5"), A)
    for options in ((), ("--overwrite",)):
        done = run(address, address, "--transpose-b", "a.h5::/c", *options)
        assert done.code == EXIT_USAGE
        assert "C at a.h5" in done.err
        assert "is read-only: give a path that ends in .zarr or .npy" in done.err
