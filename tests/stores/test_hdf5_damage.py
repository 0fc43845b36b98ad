"""Damaged HDF5 chunks and files are errors or read as the right bytes. They never crash the process."""

import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from oocgemm.errors import ExecutionError
from oocgemm.stores.hdf5_filters import Pipeline
from tests.support import TOP
from tests.support.fuzzing import bounded
from tests.support.hdf5_files import BEFORE, COMPRESSORS, opened, rewritten, stored, whole, write

SHAPE = 24, 40
VALUES = np.random.default_rng(0).integers(0, 50, SHAPE).astype("f4")
NUMBERS = [0, 1, 2, 127, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
CASES = 4000
# Compressors and the filters before them whose chunks are fuzzed.
FUZZED = [
    *((name, "") for name in COMPRESSORS if name != "none"),
    *(
        ("gzip", "both"),
        ("zstd", "shuffle"),
        ("zstd", "fletcher32"),
        ("none", "fletcher32"),
        ("none", "both"),
    ),
]


def changed(rng: np.random.Generator, data: bytes) -> bytes:
    """Return stored bytes with a few random changes: bits, bytes, numbers, a cut, or bytes added."""
    found = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, rng.choice([20, 40, len(data) + 1])))
        match rng.integers(8):
            case 0 | 1 if at < len(found):
                found[at] ^= 1 << int(rng.integers(8))
            case 2 | 3 if at < len(found):
                found[at] = int(rng.integers(256))
            case 4 | 5:
                order: Any = rng.choice(["little", "big"])
                found[at : at + 4] = NUMBERS[rng.integers(len(NUMBERS))].to_bytes(4, order)
            case 6:
                del found[at:]
            case 7:
                found += rng.bytes(int(rng.integers(1, 12)))
    return bytes(found)


@pytest.fixture(scope="module")
def chunk_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Pipeline, bytes]]:
    """Return a function that returns the pipeline of a dataset and the stored bytes of its only chunk."""
    folder = tmp_path_factory.mktemp("fuzzed")

    def get(compressor: str, before: str) -> tuple[Pipeline, bytes]:
        path = folder / f"{compressor} {before}.h5"
        if not path.exists():
            write(path, VALUES, chunks=SHAPE, **COMPRESSORS[compressor], **BEFORE[before])
        matrix: Any = opened(f"{path}::/x")
        return matrix._reader.pipeline, stored(path)

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("compressor", "before"), FUZZED)
def test_a_damaged_chunk_is_an_error_or_has_the_right_size(
    compressor: str, before: str, chunk_of: Callable[[str, str], tuple[Pipeline, bytes]]
) -> None:
    """Where no checksum covers the bytes, other elements may come out, but not outside the destination.

    gzip and fletcher32 have checksums. Then the elements are right or there is an error. Fletcher's checksum
    cannot distinguish words of zeros from words of ones.
    """
    pipeline, intact = chunk_of(compressor, before)
    checked = compressor == "gzip" or before in ("fletcher32", "both")
    rng, errors = np.random.default_rng(0), 0
    with bounded(250):
        for case in range(CASES):
            damaged = changed(rng, intact)
            room = np.full(pipeline.size + 256, 7, np.uint8)
            memory = np.full(pipeline.scratch_bytes(max(len(damaged), len(intact))) + 256, 7, np.uint8)
            out = room[128:-128]
            try:
                pipeline.decode(np.frombuffer(damaged, np.uint8), 0, out, memory[128:-128])
            except Exception:
                errors += 1
            else:
                right = np.frombuffer(VALUES.tobytes(), np.uint8)
                alike = np.isin(out, [0, 255]) & np.isin(right, [0, 255]) & (compressor == "none")
                assert not checked or ((out == right) | alike).all(), case
            for outside in (room[:128], room[-128:], memory[:128], memory[-128:]):
                assert (outside == 7).all(), case
    assert errors > CASES / 4


@pytest.mark.parametrize(("compressor", "before"), FUZZED)
def test_a_damaged_chunk_names_its_place(tmp_path: Path, compressor: str, before: str) -> None:
    options = {"chunks": (12, 20), **COMPRESSORS[compressor], **BEFORE[before]}
    address = write(tmp_path / "x.h5", VALUES, **options)
    intact = stored(tmp_path / "x.h5", (12, 20))
    for damaged in (b"\0", intact[:-3], intact[: len(intact) // 2], bytes(500)):
        rewritten(tmp_path / "x.h5", (12, 20), damaged)
        with pytest.raises(
            ExecutionError, match=r"the chunk at \[12, 20\] in .*x\.h5 .* damaged or truncated"
        ):
            whole(opened(address))
        out = np.empty((12, 40), "f4")
        opened(address).read((0, 12), (0, 40), out)
        np.testing.assert_array_equal(out, VALUES[:12])


def test_a_raw_chunk_of_another_size_is_damaged(tmp_path: Path) -> None:
    """h5py cannot write such a chunk, but a file whose index is damaged may have one."""
    matrix: Any = opened(write(tmp_path / "x.h5", VALUES, chunks=(12, 20)))
    matrix._reader.index.sizes[3] -= 4
    with pytest.raises(ExecutionError, match=r"the chunk at \[12, 20\] .* has 956 bytes instead of 960"):
        whole(matrix)


def test_data_after_a_compressed_chunk_is_ignored_as_by_hdf5(tmp_path: Path) -> None:
    address = write(tmp_path / "x.h5", VALUES, chunks=SHAPE, compression="gzip")
    rewritten(tmp_path / "x.h5", (0, 0), zlib.compress(VALUES.tobytes()) + b"more")
    with h5py.File(tmp_path / "x.h5") as file:
        expected = file["x"][...]
    np.testing.assert_array_equal(whole(opened(address)), expected)


FILES = """
import sys, warnings
import numpy as np
from oocgemm.errors import ExecutionError, InputError
from tests.support.hdf5_files import opened, whole

warnings.simplefilter("ignore")
path, seed, cases = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
intact, rng = open(path, "rb").read(), np.random.default_rng(seed)
found = {"read": 0, "refused": 0}
for _ in range(cases):
    damaged = bytearray(intact)
    for at in rng.integers(0, len(intact), rng.integers(1, 5)):
        damaged[at] = rng.choice([0, 1, 255, damaged[at] ^ 1, damaged[at] ^ 128])
    with open(path, "wb") as file:
        file.write(damaged)
    try:
        whole(opened(path + "::/x"))
        found["read"] += 1
    except (InputError, ExecutionError, EOFError, MemoryError) as error:
        found["refused"] += 1
print(found["read"], found["refused"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "before"), [("none", ""), ("gzip", "shuffle"), ("zstd", "fletcher32")]
)
def test_damaged_files_are_read_or_refused(tmp_path: Path, compressor: str, before: str) -> None:
    """Damage anything in small files, most of which is metadata that h5py parses."""
    options = {"chunks": (12, 20), **COMPRESSORS[compressor], **BEFORE[before]}
    write(tmp_path / "x.h5", VALUES, **options)
    line = [sys.executable, "-c", FILES, str(tmp_path / "x.h5"), "0", "400"]
    done = subprocess.run(line, cwd=TOP, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    read, refused = map(int, done.stdout.split())
    assert read > 20
    assert refused > 20
