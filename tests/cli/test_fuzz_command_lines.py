"""Any command line ends with the right product, or with one line that says what is wrong."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from oocgemm import BackendError
from oocgemm.cli import measuring
from oocgemm.cli.process import EXIT_BUDGET, EXIT_FAILED, EXIT_USAGE
from tests.support.fuzzing import A, B, C, delete_results, ended, folder_of_operands, fuzz
from tests.support.suite import slow


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of_operands(tmp_path_factory.mktemp("fuzz")) as folder:
        yield folder


NUMBERS = [
    "1",
    "2",
    "-1",
    "0",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1j",
    "1+2i",
    "",
    "x",
    "--",
    "1 2",
    "\N{SUPERSCRIPT TWO}",
]
SIZES = [
    "1GiB",
    "64MiB",
    "20MB",
    "1",
    "0",
    "-1",
    "1e9",
    "9999PiB",
    "1.5.5GiB",
    "GiB",
    "",
    "64 MiB",
    "\N{ARABIC-INDIC DIGIT FOUR}GiB",
    "9" * 60,
]
PAIRS = [
    "4x3",
    "8x8",
    "0x1",
    "x",
    "4",
    "4x3x2",
    "-4x3",
    "999999999999x9",
    "4X3",
    "",
    "1e3x2",
    "4x\N{SUPERSCRIPT TWO}",
]
TILES = [
    "4x3x2",
    "7x5x6",
    "100x100x100",
    "1x1x1",
    "0x0x0",
    "4x3",
    "x",
    "",
    "99999999999999x1x1",
    "4x3x2x1",
    "axbxc",
    "-1x1x1",
]
PLACES = [
    "a",
    "a.npy",
    "b",
    "b.npy",
    "c",
    "c.npy",
    "new",
    "new.npy",
    "deep/er/new",
    ".",
    "..",
    "",
    "/",
    "missing",
    "a/c",
    "file://a.npy",
    "http://",
    "memory://",
    "s3://x/y",
    "zip://a",
    "a\0b",
    "x" * 300,
    "~",
    "-",
    "--help",
    "/dev/null",
    "/proc/self/mem",
    "/dev/null/x.npy",
    "\udcff",
    "nul\nnewline",
    "C.ZARR",
    "::",
    "a.npy::b",
]
OPTIONS: dict[str, list[str] | None] = {
    "--alpha": NUMBERS,
    "--beta": NUMBERS,
    "--transpose-a": None,
    "--transpose-b": None,
    "--adjoint-a": None,
    "--adjoint-b": None,
    "--backend": ["host", "auto", "cuda", "gpu", ""],
    "--device-memory": SIZES,
    "--host-memory": SIZES,
    "--tile": TILES,
    "--chunks": PAIRS,
    "--compressor": ["none", "zstd", "gzip", "blosc-lz4", "blosc-zstd", "zip", ""],
    "--json": None,
    "--device": ["0", "1", "-1", "x", "9" * 30],
    "--kernel": ["auto", "blas", "cublas", "tiled", "x"],
    "--timeline": ["log", "a.npy", "new", "", "/", "missing/log", "a\0b"],
    "--overwrite": None,
    "--quiet": None,
    "--explain": None,
    "--path": [".", "missing", "a.npy", "", "a\0b"],
    "--debug": None,
    "--help": None,
    "--version": None,
    "--nonsense": None,
}


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Draw a command line whose options, values and order may be right or wrong."""
    name = draw(
        st.sampled_from(["run", "run", "run", "plan", "plan", "report", "calibrate", "info", "", "runs"])
    )
    places = draw(st.lists(st.sampled_from(PLACES), max_size=4))
    # Otherwise hardly any command would get as far as a product.
    if name in ("run", "plan") and draw(st.booleans()):
        places = [
            draw(st.sampled_from(good))
            for good in (["a", "a.npy"], ["b", "b.npy"], ["new", "new.npy", "c", "c.npy"])
        ]
    words = list(places)
    for option in draw(st.lists(st.sampled_from(list(OPTIONS)[:-4]), max_size=3, unique=True)):
        values = OPTIONS[option]
        if values is not None and draw(st.booleans()):
            values = values[:2]  # the first two values are valid: otherwise hardly any command would get far
        piece = [option] if values is None else [option, draw(st.sampled_from(values))]
        if len(piece) == 2 and draw(st.integers(0, 3)) == 0:
            piece = ["=".join(piece)]
        at = draw(st.sampled_from([0, len(words)]))
        words[at:at] = piece
    match draw(st.integers(0, 15)):
        case 0:
            words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(list(OPTIONS))))
        case 1 if words:
            words.pop(draw(st.integers(0, len(words) - 1)))
        case 2:
            words.insert(draw(st.integers(0, len(words))), draw(st.text(max_size=20)))
        case 3:
            return [*words, name]
    return [name, *words]


@fuzz(1000)
@given(words=lines())
def test_any_command_line_ends_well(here: Path, words: list[str]) -> None:
    delete_results(here)
    with patch.object(measuring, "measure", side_effect=BackendError("nothing is measured here")):
        # No operating system passes NUL characters in arguments.
        ended(*(word.replace("\0", "") for word in words))


@fuzz(150)
@given(data=st.data())
def test_any_product_that_is_asked_for_is_right(here: Path, data: st.DataObject) -> None:
    delete_results(here)
    draw = data.draw
    place, alpha, beta = (
        draw(st.sampled_from(["new", "new.npy"])),
        draw(st.integers(-3, 3)),
        draw(st.integers(-2, 2)),
    )
    words = [
        "run",
        draw(st.sampled_from(["a", "a.npy"])),
        draw(st.sampled_from(["b", "b.npy"])),
        place,
        "--backend",
        "host",
    ]
    words += [f"--alpha={alpha}", f"--beta={beta}"]
    for option, values in (
        ("--tile", TILES),
        ("--device-memory", SIZES),
        ("--host-memory", SIZES),
        ("--chunks", PAIRS),
    ):
        if draw(st.integers(0, 3)) == 0:
            words += [option, draw(st.sampled_from(values))]
    if beta:
        if place == "new":
            zarr.create_array(here / place, data=C, chunks=(4, 3))
        else:
            np.save(here / place, C)
    if ended(*words).code == 0:
        found = np.load(here / place) if place == "new.npy" else zarr.open_array(here / place)[:]
        np.testing.assert_array_equal(found, alpha * (A @ B) + beta * C)


# Some of these cases with the command run as a process.


@pytest.mark.parametrize(
    "words",
    ["run a b new.npy --tile 4x3x2 --backend host", "run a missing new", "report a.npy",
     *slow(("run a a new --beta nan",), ("plan a b --json",), ("info",), ("run a b new --device-memory 1",), ("run",),  # noqa: E501
           ("nonsense",), ("run a b /proc/x --chunks 4x3 --debugg",))],
)  # fmt: skip
def test_a_process_ends_well(here: Path, words: str) -> None:
    delete_results(here)
    done = subprocess.run(
        [sys.executable, "-m", "oocgemm", *words.split()],
        check=False,
        capture_output=True,
        text=True,
        cwd=here,
        timeout=120,
    )
    assert done.returncode in (0, EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET)
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.stderr.splitlines()[-1].startswith(("Error: ", "Usage: ", "  ")) or words == "run"
