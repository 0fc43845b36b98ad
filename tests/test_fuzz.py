"""Random input: a command ends either with the right product, or with one line that says what is wrong.

There are a few thousand cases, the same ones each time. Each has a time limit.
"""

import copy
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

from oocgemm import BackendError
from oocgemm.cli import measuring
from oocgemm.cli.output import EXIT_BUDGET, EXIT_FAILED, EXIT_USAGE
from tests.command import Finished, command, own_threads
from tests.suite import examples, slow

BOUND = 30  # time limit of a case, in seconds
A, B = np.arange(42.0).reshape(7, 6) % 5, np.arange(30.0).reshape(6, 5) % 7
C = np.ones((7, 5))


def fuzz(cases: int) -> Callable[[Any], Any]:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=examples(cases),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )


class Hang(BaseException):
    """A case that did not end within its time limit."""


@contextmanager
def bounded(seconds: int = BOUND) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(*arguments: str | Path) -> Finished:
    """Run a command, which must succeed or print one line and end with the exit code of an error."""
    with bounded():
        done = command(*arguments)
    if done.code != 0:
        assert done.code in (EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET), done
        lines = [line for line in done.err.splitlines() if not line.startswith("Note: ")]
        assert len(lines) == 1, done
        assert lines[0].startswith("Error: "), done
        assert len(lines[0]) > len("Error: ???"), done
    assert "Traceback" not in done.err
    assert own_threads() == []
    return done


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a folder with operands, and make it the working directory."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name, values in (("a", A), ("b", B), ("c", C)):
        np.save(folder / f"{name}.npy", values)
        zarr.create_array(folder / name, data=values, chunks=(4, 3), compressors=None)
    with pytest.MonkeyPatch.context() as change:
        change.chdir(folder)
        change.delenv("OOCGEMM_DEBUG", raising=False)
        yield folder


# Random command lines.

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
    _fresh(here)
    with patch.object(measuring, "measure", side_effect=BackendError("nothing is measured here")):
        # No operating system passes NUL characters in arguments.
        ended(*(word.replace("\0", "") for word in words))


def _fresh(here: Path) -> None:
    """Delete the files that a run may have written."""
    for name in ("new", "new.npy.oocgemm", "deep", "C.ZARR"):
        shutil.rmtree(here / name, ignore_errors=True)
    (here / "new.npy").unlink(missing_ok=True)


@fuzz(150)
@given(data=st.data())
def test_any_product_that_is_asked_for_is_right(here: Path, data: st.DataObject) -> None:
    _fresh(here)
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


# Metadata of arrays with random changes.

STORES: dict[str, dict[str, Any]] = {
    "v3 raw": {"compressors": None},
    "v3 zstd": {"compressors": ZstdCodec()},
    "v3 blosc, transposed": {"compressors": BloscCodec(cname="lz4"), "filters": [TransposeCodec(order=(1, 0))]},  # noqa: E501
    "v3 shards": {"chunks": (8, 6), "serializer": ShardingCodec(chunk_shape=(4, 3), codecs=[BytesCodec(), Crc32cCodec()]), "compressors": None},  # noqa: E501
    "v2 raw": {"zarr_format": 2, "compressors": None},
    "v2 lz4, Fortran": {"zarr_format": 2, "compressors": numcodecs.LZ4(), "order": "F"},
    "v2 delta": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")], "compressors": numcodecs.Zlib()},
}  # fmt: skip
# Values to put into metadata where they do not belong. No value describes a matrix that is so large that
# multiplying it would take long.
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1.5, 1e308, float("nan"), 2**31, 2**53, 2**63, 2**64, 10**30, "", "x", "NaN", "0x7ff"),  # noqa: E501
    *("C", "F", "K", "float32", "float64", "<f8", ">f8", "<f4", "|b1", "<U3", "|O", "complex64", "bfloat16", "string", "int8"),  # noqa: E501
    *([], {}, [[]], [1], [7, 6], [4, 3], [0, 0], [1, 1, 1], [-4, 3], [2**40, 2**40], [7, 2**62], ["a", None], {"name": "x"}, {"id": "x"}),  # noqa: E501
    *("default", "v2", "regular", "bytes", "zstd", "gzip", "blosc", "crc32c", "transpose", "sharding_indexed", "little", "big", "middle"),  # noqa: E501
    *({"name": "bytes"}, {"name": "gzip", "configuration": {"level": 99}}, {"name": "transpose", "configuration": {"order": [1, 1]}}),  # noqa: E501
    *({"id": "zstd"}, {"id": "blosc", "cname": "x"}, {"name": "blosc", "configuration": {}}, {"id": "pickle"}, {"id": "vlen-utf8"}),  # noqa: E501
]  # fmt: skip


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON document, as (the list or object that contains it, its index or key)."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [place for key in keys for place in ((value, key), *_nodes(value[key]))]


def mutated(data: st.DataObject, document: Any) -> Any:
    """Return a document of which a few parts are deleted, swapped or replaced."""
    document = {"": copy.deepcopy(document)}
    for _ in range(data.draw(st.integers(1, 3))):
        places = _nodes(document)[1:] or _nodes(document)
        parent, key = data.draw(st.sampled_from(places))
        match data.draw(st.integers(0, 5)):
            case 0:
                del parent[key]
            case 1:
                other, there = data.draw(st.sampled_from(places))
                parent[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(parent[key])
            case 2:
                parent[key] = [copy.deepcopy(parent[key])] * data.draw(st.integers(1, 3))
            case _:
                parent[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        if "" not in document:
            return None
    return document[""]


def garbled(data: st.DataObject, content: bytes) -> bytes:
    """Return bytes of which some are deleted, changed or repeated."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.sampled_from([0, 1, 2, 4, 8, 100])))
        match data.draw(st.integers(0, 5)):
            case 0:
                content = content[:start]
            case 1:
                content = content[:start] + content[stop:]
            case 2:
                content = content[:stop] + content[start:]
            case 3:
                content = content[:start] + bytes(stop - start) + content[stop:]
            case 4:
                content = content[:start] + b"\xff" * (stop - start) + content[stop:]
            case 5:
                content = content[:start] + data.draw(st.binary(max_size=8)) + content[stop:]
    return content


@pytest.fixture(scope="module", params=STORES)
def stored(here: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Store A in one of the formats of STORES, and return its path."""
    options = {"chunks": (4, 3)} | STORES[request.param]
    zarr.create_array(here / "stored", shape=A.shape, dtype="f8", **options)[:] = A
    yield here / "stored"
    shutil.rmtree(here / "stored")


def product_of(stored: Path, *options: str, must: bool = False) -> Any:
    """Return the product with B, or None if the command refuses it. With `must` it may not refuse."""
    _fresh(stored.parent)
    done = ended("run", stored.name, "b.npy", "new.npy", "--backend", "host", *options)
    assert done.code == 0 or not must, done
    if done.code == 0:
        return np.load(stored.parent / "new.npy")
    assert not (stored.parent / "new.npy").exists()
    return None


def metadata(stored: Path) -> Path:
    return next(stored / name for name in ("zarr.json", ".zarray") if (stored / name).exists())


@fuzz(180)
@given(data=st.data())
def test_any_metadata_ends_well(stored: Path, data: st.DataObject) -> None:
    place = metadata(stored)
    whole = place.read_bytes()
    try:
        place.write_text(json.dumps(mutated(data, json.loads(whole))))
        product_of(stored)
    finally:
        place.write_bytes(whole)


@fuzz(40)
@given(data=st.data())
def test_metadata_that_is_no_document_ends_well(stored: Path, data: st.DataObject) -> None:
    place = metadata(stored)
    whole = place.read_bytes()
    deep = data.draw(st.sampled_from([None, 500, 100_000]))
    try:
        place.write_bytes(b"[" * deep + b"]" * deep if deep else garbled(data, whole))
        product_of(stored)
    finally:
        place.write_bytes(whole)


CHECKED: dict[str, dict[str, Any]] = STORES | {
    "v3 crc32c": {"compressors": Crc32cCodec()},
    "v3 zstd, checked": {"compressors": ZstdCodec(checksum=True)},
    "v3 gzip": {"compressors": GzipCodec()},
    "v3 zstd, crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "v2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib()},
    "v2 blosc": {"zarr_format": 2, "compressors": numcodecs.Blosc(cname="zstd", shuffle=2)},
    "v2 lzma": {"zarr_format": 2, "compressors": numcodecs.LZMA()},
    "v2 bz2": {"zarr_format": 2, "compressors": numcodecs.BZ2()},
}
# Formats that notice every change of their bytes: the product is right, or the command fails.
FINDING = ("v3 crc32c", "v3 zstd, checked", "v3 zstd, crc32c", "v3 shards", "v2 zlib", "v2 bz2")


@pytest.fixture(scope="module", params=CHECKED)
def chunked(here: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    options = {"chunks": (4, 3)} | CHECKED[request.param]
    zarr.create_array(here / "chunked", shape=A.shape, dtype="f8", **options)[:] = A
    yield request.param, here / "chunked"
    shutil.rmtree(here / "chunked")


@fuzz(60)
@given(data=st.data())
def test_any_chunk_ends_well(chunked: tuple[str, Path], data: st.DataObject) -> None:
    kind, folder = chunked
    files = sorted(
        place
        for place in folder.rglob("*")
        if place.is_file() and not place.name.endswith((".json", ".zarray", ".zattrs"))
    )
    one, other = (data.draw(st.sampled_from(files)) for _ in range(2))
    whole = one.read_bytes()
    changed = other.read_bytes() if data.draw(st.integers(0, 7)) == 0 else garbled(data, whole)
    try:
        one.write_bytes(changed)
        product = product_of(folder, "--tile", "4x5x3")
    finally:
        one.write_bytes(whole)
    if product is not None and (changed == whole or (kind in FINDING and one == other)):
        np.testing.assert_array_equal(product, A @ B)


@fuzz(500)
@given(data=st.data())
def test_any_npy_file_ends_well(here: Path, data: st.DataObject) -> None:
    whole = (here / "a.npy").read_bytes()
    if data.draw(st.booleans()):
        described = mutated(data, {"descr": "<f8", "fortran_order": False, "shape": [7, 6]})
        header = repr(described).replace("[", "(").replace("]", ")").encode("utf-8", "replace")
        header += b" " * (118 - len(header)) if len(header) < 118 else b""
        content = whole[:8] + len(header).to_bytes(2, "little") + header + whole[128:]
    else:
        content = garbled(data, whole[: data.draw(st.sampled_from([20, 128, 10_000]))]) + whole[128:]
    (here / "odd.npy").write_bytes(content)
    product = product_of(here / "odd.npy", must=content == whole)
    if content == whole:
        np.testing.assert_array_equal(product, A @ B)


# Logs with random changes.


@pytest.fixture(scope="module")
def log(here: Path) -> list[str]:
    assert (
        ended("run", "a", "b", "logged.npy", "--backend", "host", "--tile", "4x5x3", "--timeline", "log").code
        == 0
    )
    return (here / "log").read_text().splitlines()


@fuzz(600)
@given(data=st.data())
def test_any_log_ends_well(here: Path, log: list[str], data: st.DataObject) -> None:
    lines = list(log)
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.sampled_from([0, len(lines) - 1, *range(len(lines))])) if lines else 0
        match data.draw(st.integers(0, 3)):
            case 0 if lines:
                del lines[number]
            case 1 if lines:
                lines.insert(data.draw(st.integers(0, len(lines))), lines[number])
            case _ if lines:
                try:
                    lines[number] = json.dumps(mutated(data, json.loads(lines[number])))
                except ValueError:
                    lines[number] = "{"
    content = "\n".join(lines).encode()
    if data.draw(st.integers(0, 3)) == 0:
        content = garbled(data, content)
    (here / "odd.jsonl").write_bytes(content)
    ended("report", "odd.jsonl", *data.draw(st.sampled_from([[], ["--json"]])))


@pytest.mark.parametrize(
    "damage",
    [
        *(
            {"plan": 5},
            {"plan": {"least": []}},
            {"plan": {"required": {"read": "x"}}},
            {"plan": {"machine": 3}},
        ),
        *({"rates": {"kernel": 0}}, {"rates": 7}, {"operands": []}, {"operands": {"A": 1}}, {"retried": 3}),
        *(
            {"checks": [1]},
            {"checks": {"tiles": 1}},
            {"backend": []},
            {"machine": "x"},
            {"machine": {"memory": "x"}},
        ),
    ],
    ids=str,
)
def test_a_header_that_says_nonsense_is_refused(here: Path, log: list[str], damage: dict[str, Any]) -> None:
    # A fact in the last line replaces the same fact in the first line.
    ends = (json.dumps(json.loads(line) | damage) for line in (log[0], log[-1]))
    (here / "odd.jsonl").write_text("\n".join([next(ends), *log[1:-1], next(ends)]))
    assert "its header is damaged" in ended("report", "odd.jsonl").err


# Some of these cases with the command run as a process.


@pytest.mark.parametrize(
    "words",
    ["run a b new.npy --tile 4x3x2 --backend host", "run a missing new", "report a.npy",
     *slow(("run a a new --beta nan",), ("plan a b --json",), ("info",), ("run a b new --device-memory 1",), ("run",),  # noqa: E501
           ("nonsense",), ("run a b /proc/x --chunks 4x3 --debugg",))],
)  # fmt: skip
def test_a_process_ends_well(here: Path, words: str) -> None:
    _fresh(here)
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
