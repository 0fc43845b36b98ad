"""Random products of arrays in random stores, and what NumPy computes from an independent reader of them.

A case is a number, from which everything random is drawn. It also says whether arrays are read as on
many cores, and as large ones are. To run one case again, or many::

    python -m tests.support.store_cases 17
    python -m tests.support.store_cases 5000 20000

Elements are small integers, so that every product is exact.
"""

import json
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import ml_dtypes
import numcodecs
import numpy as np
import tensorstore
import zarr
from numpy.typing import NDArray
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)
from zarr.codecs import numcodecs as extensions
from zarr.storage import LocalStore, MemoryStore

import oocgemm
from oocgemm import Transform
from oocgemm.stores import zarr_through
from tests.support.hdf5_files import BEFORE, COMPRESSORS, THROUGH_H5PY
from tests.support.web_files import web_server

zarr_through.register_bfloat16()
Array = NDArray[Any]
Shape = tuple[int, int]
BF16 = np.dtype(ml_dtypes.bfloat16)
# Warnings of the libraries that write the arrays, and of arrays that only h5py can decode.
WARNINGS = (
    "ignore:Combining a `sharding_indexed` codec",
    "ignore:Numcodecs codecs are not in",
    "ignore:.* is read by h5py",
    "ignore:Found an empty list of filters",
    "ignore:The codec `",
    "ignore:The data type",
    "ignore:invalid value encountered in cast:RuntimeWarning",
)
DTYPES = (*map(np.dtype, ("f2", "f4", "f8", "c8", "c16", "i1")), BF16)
# Sizes from which arrays are read in other ways, as they would be for large arrays.
LARGE: dict[str, dict[str, Any]] = {
    "lines": {"MIN_SEGMENT": 16},
    "npy": {"MIN_DIRECT": 64},
    "zarr_chunks": {
        **{"MIN_DIRECT": 64, "MAX_DECODED": 64, "MAX_COPIED": 64},
        **{"MIN_SEGMENT": 16, "MIN_LINE_ON_MANY_CORES": 16},
    },
    "hdf5_chunks": {"MIN_DIRECT": 512, "MIN_STRAIGHT": 64},
}
# The dtypes that C may have, if A and B have another one.
RESULTS = {"int8": ("int32", "int64", "float64"), "float16": ("float16", "float32")}


@dataclass(frozen=True)
class Stored:
    """An operand in a store: what is given to oocgemm, its elements, and how it is stored, for messages."""

    operand: Any
    elements: Array
    text: str


class Draw(random.Random):
    """Random choices for one case. `web` is the URL of the folder of the case."""

    def __init__(self, seed: int, web: str) -> None:
        super().__init__(seed)
        self.web = web

    def extent(self, largest: int) -> int:
        return self.choice((1, 2, *(self.randint(1, largest) for _ in range(4))))

    def chunk(self, shape: Shape) -> Shape:
        """Return the extents of chunks, of which an array has at most 36: files take most of the time."""
        rows, cols = (max(self.extent(12), -(-extent // 6)) for extent in shape)
        return rows, cols

    def chance(self, share: float) -> bool:
        return self.random() < share

    def blocks(self, shape: Shape) -> list[tuple[slice, slice]]:
        """Return the blocks of an array that are written: usually the whole, else up to three parts."""
        if self.chance(0.4):
            return [(slice(0, shape[0]), slice(0, shape[1]))]
        blocks = list[tuple[slice, slice]]()
        for _ in range(self.randint(0, 3)):
            ends = [sorted((self.randint(0, extent), self.randint(0, extent))) for extent in shape]
            blocks.append((slice(*ends[0]), slice(*ends[1])))
        return [block for block in blocks if all(part.stop > part.start for part in block)]

    def integers(self, shape: Shape, dtype: np.dtype[Any]) -> Array:
        rng = np.random.default_rng(self.getrandbits(32))
        values = rng.integers(-3, 4, (2, *shape))
        chosen: Array = values[0] + 1j * values[1] if dtype.kind == "c" else values[0]
        return chosen.astype(dtype.newbyteorder("="))

    def order(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype with a random byte order."""
        return dtype if dtype == BF16 or self.chance(0.5) else dtype.newbyteorder(">")

    def fill(self, dtype: np.dtype[Any], *, finite: bool = False) -> Any:
        if dtype.kind == "c":
            return self.choice((0, 2 - 1j))
        plain = (0, 0, 3, -2)
        return self.choice(plain if finite or dtype.kind == "i" else (*plain, -0.0, np.nan, np.inf, -np.inf))


def expected(stored: Any, written: Array, text: str) -> Array:
    """Return the elements that a reader found. Check that they are those that were written."""
    found: Array = np.asarray(stored[:])
    found = found if found.dtype == BF16 else found.astype(found.dtype.newbyteorder("="))
    assert_equal(found, written, f"the independent reader of {text}")
    return found


def assert_equal(found: Array, wanted: Array, what: str) -> None:
    if found.dtype == wanted.dtype == BF16:  # NumPy does not find its NaN
        found, wanted = found.astype("f4"), wanted.astype("f4")
    np.testing.assert_array_equal(found, wanted, what)


def zarr_v2(draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], *, lossless: bool = False) -> Stored:
    """Write an array of zarr format 2 by zarr, as some version of zarr might have written its metadata."""
    stored = draw.order(dtype)
    filters = list[Any]()
    if dtype != BF16 and draw.chance(0.4):
        choices: list[list[Any]] = [[numcodecs.Shuffle(dtype.itemsize)]]
        if not lossless:
            delta = numcodecs.Delta(stored.str)
            choices += [[delta], [delta, numcodecs.Shuffle(dtype.itemsize)]]
        if not lossless and dtype.kind == "f":
            packed = draw.choice(("<i2", ">i2", "<i4", ">i4", "u1", "<f4"))
            choices.append([numcodecs.FixedScaleOffset(-9, 2, stored.str, packed)])
            choices.append([numcodecs.AsType(draw.choice(("<f2", ">f4", "<f8")), stored.str)])
        filters = draw.choice(choices)
    options: dict[str, Any] = {
        "chunks": draw.chunk(shape),
        "dtype": stored,
        "fill_value": draw.fill(dtype, finite=bool(filters)),
        "order": draw.choice("CF"),
        "filters": filters or None,
        "compressors": draw.choice(
            (
                None,
                numcodecs.Zstd(level=1),
                numcodecs.Zstd(level=1, checksum=True),
                numcodecs.Blosc(
                    draw.choice(("lz4", "lz4hc", "zstd", "blosclz", "zlib")), shuffle=draw.randint(0, 2)
                ),
                numcodecs.GZip(level=1),
                numcodecs.LZ4(),
                numcodecs.Zlib(level=1),
                numcodecs.BZ2(level=1),
                numcodecs.LZMA(),
            )
        ),
        "chunk_key_encoding": {"name": "v2", "separator": draw.choice("./")},
        "config": {"write_empty_chunks": draw.chance(0.5)},
    }
    if dtype == BF16:
        options["compressors"] = None  # zarr cannot compress it in this format
    return zarr_array(draw, place, shape, dtype, {"zarr_format": 2} | options)


def zarr_v3(draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], *, lossless: bool = False) -> Stored:
    """Write an array of zarr format 3 by zarr."""
    chunk = draw.chunk(shape)
    endian = BytesCodec(endian="little" if dtype == BF16 else draw.choice(("little", "big")))
    filters: list[Any] = [TransposeCodec(order=draw.choice(((0, 1), (1, 0))))] if draw.chance(0.4) else []
    # zarr itself decodes filters behind a transpose, or with elements in big-endian order, to other elements.
    plain = bool(filters) or lossless or dtype.kind not in "fi" or draw.chance(0.7)
    if not plain:
        endian, name = BytesCodec(endian="little"), dtype.name
        filters = [extensions.Delta(dtype=name)]
        if dtype.kind == "f" and draw.chance(0.7):
            astype = draw.choice(("<i2", "<i4"))
            scaled = extensions.FixedScaleOffset(offset=-9, scale=2, dtype=name, astype=astype)
            filters = [draw.choice((extensions.BitRound(keepbits=4), scaled))]
    behind: list[list[Any]] = [
        [],
        [ZstdCodec(level=1, checksum=draw.chance(0.5))],
        [
            BloscCodec(
                cname=draw.choice(("lz4", "zstd", "blosclz", "zlib")),
                shuffle=draw.choice(("shuffle", "noshuffle")),
            )
        ],
        [GzipCodec(level=1)],
        [ZstdCodec(level=1), GzipCodec(level=1)],
        [Crc32cCodec(), ZstdCodec(level=1)],
        [
            extensions.Shuffle(elementsize=dtype.itemsize if plain else min(2, dtype.itemsize)),
            extensions.Zlib(level=1),
        ],
        [extensions.LZ4()],
    ]
    compressors = draw.choice(behind)
    if draw.chance(0.3):
        compressors = [*compressors, Crc32cCodec()]
    options: dict[str, Any] = {"filters": filters, "serializer": endian, "compressors": compressors}
    options["chunks"] = chunk
    if draw.chance(0.4):
        for _ in range(draw.choice((1, 1, 1, 2))):
            inner, across = options["chunks"], (draw.randint(1, 3), draw.randint(1, 3))
            options["chunks"] = (inner[0] * across[0], inner[1] * across[1])
            index = [BytesCodec(endian=draw.choice(("little", "big")))]
            sharding = ShardingCodec(
                chunk_shape=inner,
                codecs=[*options["filters"], options["serializer"], *options["compressors"]],
                index_codecs=[*index, Crc32cCodec()] if draw.chance(0.7) else index,
                index_location=draw.choice(("start", "end")),
            )
            options |= {"filters": [], "serializer": sharding, "compressors": []}
        if draw.chance(0.15):
            options["compressors"] = [GzipCodec(level=1)]
    separator = draw.choice("./")
    options |= {
        "dtype": dtype,
        "fill_value": draw.fill(dtype, finite=not plain),
        "chunk_key_encoding": {"name": draw.choice(("default", "v2")), "separator": separator},
        "config": {"write_empty_chunks": draw.chance(0.5)},
    }
    return zarr_array(draw, place, shape, dtype, {"zarr_format": 3} | options)


def zarr_array(
    draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], options: dict[str, Any]
) -> Stored:
    """Create an array by zarr, write blocks of it, and give it to oocgemm in one of several forms."""
    in_memory = draw.chance(0.1)
    store: Any = MemoryStore() if in_memory else LocalStore(place)
    text = f"zarr {shape} {options}"
    array: Any = zarr.create_array(store, shape=shape, **options)
    written = np.full(shape, options["fill_value"], dtype)
    values = draw.integers(shape, dtype)
    for block in draw.blocks(shape):
        array[block] = values[block]
        written[block] = values[block]
    if options["zarr_format"] == 2 and not in_memory:
        edit_v2(draw, place)
    mode: Any = "r+"
    array = zarr.open_array(store, mode=mode)
    elements = expected(array, written, text)
    form = array if in_memory else draw.choice((str(place), place, array))
    return Stored(form, elements, f"{type(form).__name__} of {text}")


def edit_v2(draw: Draw, place: Path) -> None:
    """Change the metadata to another form that means the same, as other versions and writers have it."""
    document = json.loads((place / ".zarray").read_bytes())
    if document["dimension_separator"] == "." and draw.chance(0.4):
        del document["dimension_separator"]
    if not document["filters"] and draw.chance(0.2):
        document["filters"] = []
    if document["fill_value"] in (0, 0.0) and draw.chance(0.3):
        document["fill_value"] = None
    (place / ".zarray").write_text(json.dumps(document, indent=draw.choice((None, 2, 4))))
    if draw.chance(0.3):
        (place / ".zattrs").unlink(missing_ok=True)
    elif draw.chance(0.3):
        (place / ".zattrs").write_text('{"units": "m"}')


def by_tensorstore(
    draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], *, lossless: bool = False
) -> Stored:
    """Write an array of either zarr format by tensorstore."""
    chunk, fill = draw.chunk(shape), draw.fill(dtype)
    shown: Any = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(fill), fill)
    if dtype.kind == "c":
        shown = [complex(fill).real, complex(fill).imag]
    spec: dict[str, Any] = {"kvstore": {"driver": "file", "path": str(place)}}
    if draw.chance(0.5):
        spec["driver"] = "zarr"
        stored = "bfloat16" if dtype == BF16 else draw.order(dtype).str
        compressors: Sequence[Any] = (
            None,
            {
                "id": "blosc",
                "cname": draw.choice(("lz4", "zstd")),
                "clevel": 3,
                "shuffle": draw.randint(0, 2),
            },
            {"id": "zlib", "level": 1},
            {"id": "gzip", "level": 1},
            {"id": "bz2", "level": 1},
            {"id": "zstd", "level": 1},
        )
        spec["metadata"] = {
            "shape": shape,
            "chunks": chunk,
            "dtype": stored,
            "order": draw.choice("CF"),
            "compressor": draw.choice(compressors),
            "fill_value": draw.choice((shown, None)) if str(fill) == "0" else shown,
            "dimension_separator": draw.choice("./"),
        }
    else:
        spec["driver"] = "zarr3"
        bytes_codec = {
            "name": "bytes",
            "configuration": {"endian": draw.choice(("little", "big")) if dtype != BF16 else "little"},
        }
        if dtype.itemsize == 1:
            bytes_codec = {"name": "bytes"}
        codecs: list[Any] = [bytes_codec]
        if draw.chance(0.4):
            codecs.insert(0, {"name": "transpose", "configuration": {"order": draw.choice(([0, 1], [1, 0]))}})
        codecs += draw.choice(
            (
                [],
                [{"name": "gzip", "configuration": {"level": 1}}],
                [{"name": "zstd", "configuration": {"level": 1}}],
                [
                    {
                        "name": "blosc",
                        "configuration": {
                            "cname": draw.choice(("lz4", "zstd")),
                            "clevel": 3,
                            "shuffle": draw.choice(("noshuffle", "shuffle", "bitshuffle")),
                        },
                    }
                ],
            )
        )
        if draw.chance(0.3):
            codecs.append({"name": "crc32c"})
        outer = chunk
        if draw.chance(0.4):
            outer = chunk[0] * draw.randint(1, 3), chunk[1] * draw.randint(1, 3)
            index = {"name": "bytes", "configuration": {"endian": draw.choice(("little", "big"))}}
            configuration = {
                "chunk_shape": chunk,
                "codecs": codecs,
                "index_codecs": [index, {"name": "crc32c"}] if draw.chance(0.7) else [index],
                "index_location": draw.choice(("start", "end")),
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        spec["metadata"] = {
            "shape": shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
            "chunk_key_encoding": {
                "name": draw.choice(("default", "v2")),
                "configuration": {"separator": draw.choice("./")},
            },
            "codecs": codecs,
            "fill_value": shown,
        }
    text = f"tensorstore {json.dumps(spec)}"
    array = tensorstore.open(spec, create=True, open=True).result()
    written, values = np.full(shape, fill, dtype), draw.integers(shape, dtype)
    for block in draw.blocks(shape):
        array[block] = values[block]
        written[block] = values[block]
    elements = expected(array.read().result(), written, text)
    form = draw.choice((str(place), str(place), array))
    return Stored(form, elements, f"{type(form).__name__} of {text}")


def by_h5py(draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], *, lossless: bool = False) -> Stored:
    """Write a dataset of a new HDF5 file. It may be resized after parts of it were written."""
    place.mkdir()
    fill, old, options = draw.fill(dtype), shape, dict[str, Any]()
    if fill or draw.chance(0.5):
        options["fillvalue"] = complex(fill) if dtype.kind == "c" else fill
    if draw.chance(0.85):
        options |= chunked(draw, shape, dtype)
        if "maxshape" in options and draw.chance(0.4):
            limits = zip((draw.extent(40), draw.extent(40)), options["maxshape"], strict=True)
            first, second = (extent if limit is None else min(extent, limit) for extent, limit in limits)
            old = first, second
    options["dtype"] = draw.order(dtype)
    text = f"{old} -> {shape} {options}"
    if draw.chance(0.3):  # chunks that are allocated early are indexed in another form
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if "chunks" not in options:
            properties.set_layout(h5py.h5d.COMPACT)
        else:
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        options["dcpl"] = properties
    version = draw.choice(("earliest", ("earliest", "v108"), "v110", "latest", ("v110", "latest")))
    name, file = draw.choice(("x", "group/x")), place / "f.h5"
    text = f"HDF5 {version}{', compact or early' if 'dcpl' in options else ''}: {text}"
    written, values = np.full((80, 80), fill, dtype), draw.integers((80, 80), dtype)
    with h5py.File(file, "w", libver=version, userblock_size=draw.choice((0, 0, 512))) as opened:
        dataset = opened.create_dataset(name, shape=old, **options)
        for extents in (old, shape) if old != shape else (shape,):
            if extents != dataset.shape:
                dataset.resize(extents)
                written[extents[0] :] = fill
                written[:, extents[1] :] = fill
            for block in draw.blocks(extents):
                dataset[block] = values[block]
                written[block] = values[block]
    with h5py.File(file) as opened:
        elements = expected(opened[name], written[: shape[0], : shape[1]], text)
    form: Any = f"{file}::{draw.choice(('', '/'))}{name}"
    if draw.chance(0.3):
        form = h5py.File(file)[name]
    return Stored(form, elements, f"{type(form).__name__} of {text}")


def chunked(draw: Draw, shape: Shape, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return options of `create_dataset` for a dataset in chunks."""
    options = dict[str, Any](BEFORE[draw.choice(sorted(BEFORE))])
    if draw.chance(0.85):
        options |= COMPRESSORS[draw.choice(sorted(COMPRESSORS))]
    else:
        options |= THROUGH_H5PY[draw.choice(("lzf", "blosc2", "bitshuffle"))]
    if dtype.kind == "i" and "fletcher32" not in options and draw.chance(0.1):
        options["scaleoffset"] = 0
    limits: Sequence[int | None] = shape
    if draw.chance(0.7):
        limits = [draw.choice((None, None, extent, extent + draw.randint(0, 20))) for extent in shape]
        options["maxshape"] = tuple(limits)
    extents = zip(draw.chunk(shape), limits, strict=True)
    options["chunks"] = tuple(extent if limit is None else min(extent, limit) for extent, limit in extents)
    if draw.chance(0.3):
        options["fill_time"] = draw.choice(("alloc", "ifset"))
    return options


def by_numpy(
    draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any], *, lossless: bool = False
) -> Stored:
    """Write a .npy file, or keep the array in memory."""
    values = draw.integers(shape, dtype)
    if dtype == BF16 or draw.chance(0.5):
        return Stored(values, values, f"ndarray {shape}")
    stored = np.asarray(values, draw.order(dtype), order="F" if draw.chance(0.5) else "C")
    np.save(f"{place}.npy", stored)
    return Stored(f"{place}.npy", values, f".npy {stored.dtype} {stored.flags.f_contiguous}")


WRITERS = (zarr_v2, zarr_v2, zarr_v3, zarr_v3, by_tensorstore, by_h5py, by_h5py, by_numpy)


def operand(draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any]) -> Stored:
    writer = draw.choice(WRITERS)
    if dtype == BF16 and writer is by_h5py:
        writer = zarr_v3
    stored = writer(draw, place, shape, dtype)
    is_folder = isinstance(stored.operand, str | Path) and Path(stored.operand) == place
    if is_folder and draw.chance(0.2):
        return Stored(f"{draw.web}/{place.name}", stored.elements, f"URL of {stored.text}")
    return stored


def run(seed: int, folder: Path, web: str) -> None:
    """Compute the product of a case in an empty folder, whose URL is `web`, and compare it with NumPy's.

    Raises `AssertionError`, which names the case, if they differ or the product cannot be computed.
    """
    draw, texts = Draw(seed, web), list[str]()
    try:
        with ExitStack() as stack:
            cores = {"MAPPING_CORES": 0 if seed % 2 else 1 << 20}
            sizes = {"files": cores} | (LARGE if seed // 2 % 2 else {})
            for module, values in sizes.items():
                stack.enter_context(patch.multiple(f"oocgemm.stores.{module}", **values))
            _run(draw, folder, texts)
    except Exception as error:
        case = "\n  ".join([f"case {seed}: python -m tests.support.store_cases {seed}", *texts])
        raise AssertionError(f"{case}\n{type(error).__name__}: {error}") from error


def _run(draw: Draw, folder: Path, texts: list[str]) -> None:
    dtype = draw.choice(DTYPES)
    m, n, k = (draw.extent(40) for _ in "mnk")
    op_a, op_b = draw.choice("NTC"), draw.choice("NTC")
    casts = dict[str, Any]()
    read = dict[str, Stored]()
    for name, shape, op in (("a", (m, k), op_a), ("b", (k, n), op_b)):
        stored = dtype
        if dtype.name == "float64" and draw.chance(0.2):
            stored, casts[f"transform_{name}"] = (
                np.dtype(draw.choice(("i4", "i8"))),
                Transform(cast="float64"),
            )
        read[name] = operand(draw, folder / name, shape if op == "N" else shape[::-1], stored)
        texts.append(f"{name}: {read[name].text}")
    a, b = read["a"], read["b"]
    exact = np.complex128 if dtype.kind == "c" else np.float64
    out_dtype = BF16 if dtype == BF16 else np.dtype(draw.choice(RESULTS.get(dtype.name, (dtype.name,))))
    c, step, options = destination(draw, folder / "C", (m, n), out_dtype)
    texts.append(f"C: {c.text}")
    alpha, beta = draw.choice((1, 1, 2, -1)), options.get("beta", 0)
    options |= casts | {
        "trans_a": op_a,
        "trans_b": op_b,
        "alpha": alpha,
        "out_dtype": out_dtype.name,
        "backend": "host",
    }
    if draw.chance(0.8):
        tile = [draw.randint(-(-extent // 4), extent) for extent in (m, n, k)]
        tile[:2] = [-(-t // s) * s for t, s in zip(tile, step, strict=False)]
        options["tile"] = "x".join(map(str, tile))
    texts.append(f"{m} x {n} x {k}: {options}")
    left, right = (_op(x.elements.astype(exact), op) for x, op in ((a, op_a), (b, op_b)))
    with np.errstate(invalid="ignore"):
        wanted = alpha * (left @ right)
        wanted = (wanted + beta * c.elements.astype(exact) if beta else wanted).astype(out_dtype)
    found = oocgemm.gemm(a.operand, b.operand, c.operand, **options).out
    for x in (a, b):
        if isinstance(x.operand, h5py.Dataset):
            x.operand.file.close()
    assert_equal(_elements(found), wanted, "the product")
    match c.operand:
        case None | zarr.Array():
            pass
        case Path(suffix=".npy"):
            assert_equal(np.load(c.operand), wanted, "C as NumPy reads it")
        case place:
            assert_equal(_elements(zarr.open_array(place, mode="r")), wanted, "C as zarr reads it")


def destination(
    draw: Draw, place: Path, shape: Shape, dtype: np.dtype[Any]
) -> tuple[Stored, Shape, dict[str, Any]]:
    """Choose where C is stored. Return that, the extents that tiles must be multiples of, and options."""
    old = np.zeros(shape, dtype)
    kind = draw.choice(("memory", "new", "new", "stored", "stored", "npy"))
    if kind == "new":
        compressor, chunks = (
            draw.choice(("none", "zstd", "blosc-lz4", "blosc-zstd", "gzip")),
            draw.chunk(shape),
        )
        return Stored(place, old, "new zarr"), chunks, {"chunks": chunks, "compressor": compressor}
    if kind == "stored":
        stored = draw.choice((zarr_v2, zarr_v3))(draw, place, shape, dtype, lossless=True)
        c, beta = stored.operand, draw.choice((0, 1, -1))
        array: Any = c if isinstance(c, zarr.Array) else zarr.open_array(c, mode="r")
        options = {"beta": beta, "overwrite": not beta and array is not c}
        return stored, array.shards or array.chunks, options
    if kind == "npy" and dtype != BF16:
        return Stored(place.with_suffix(".npy"), old, "new .npy"), (1, 1), {}
    return Stored(None, old, "in memory"), (1, 1), {}


def _op(array: Array, op: str) -> Array:
    return array if op == "N" else array.T if op == "T" else array.conj().T


def _elements(stored: Any) -> Array:
    """Read a result. Return its elements in native byte order."""
    found: Array = np.asarray(stored[:])
    return found if found.dtype == BF16 else found.astype(found.dtype.newbyteorder("="))


def run_all(seeds: range, folder: Path) -> Iterator[AssertionError]:
    """Run cases, each in a folder that is deleted after it. Yield the errors of those that fail."""
    with web_server(folder) as url:
        for seed in seeds:
            place = folder / str(seed)
            place.mkdir()
            try:
                run(seed, place, f"{url}/{seed}")
            except AssertionError as error:
                yield error
            shutil.rmtree(place)


def main(first: int, last: int) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failed = 0
        for error in run_all(range(first, last), Path(folder)):
            print(f"{error}\n", flush=True)
            failed += 1
    print(f"{failed} of {last - first} cases failed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[-1]) if len(sys.argv) > 2 else int(sys.argv[1]) + 1)
