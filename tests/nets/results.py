"""Small products of every verb, dtype and store, and digests of their results.

Results of small integers are exact, so their digests are the same on every machine. The file `results.json`
keeps them. Results of random floats depend on the BLAS kernels, so they are only compared between two trees
on one machine: record both, each with the tree that PYTHONPATH names, then compare.

usage: python -m tests.nets.results keep                  writes results.json anew
       python -m tests.nets.results record FILE [BACKEND] records all results, random floats included
       python -m tests.nets.results compare FILE FILE     lists the results that differ
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

import oocgemm

KEPT = Path(__file__).with_suffix(".json")
M, N, K = 23, 17, 31
TILES = "10x8x7", "23x17x31"
SQUARES = "10x10x7", "23x23x31"
DTYPES = "int8", "float16", "float32", "float64", "complex64", "complex128"

Compute = Callable[..., Any]
Make = Callable[..., NDArray[Any]]


def integers(shape: tuple[int, int], dtype: str, seed: int) -> NDArray[Any]:
    """Return small integers whose sums over `K` are exact in every dtype."""
    drawn = np.random.default_rng(seed).integers(-3, 4, (2, *shape))
    x: NDArray[Any] = drawn[0] + 1j * drawn[1] if dtype.startswith("complex") else drawn[0]
    return x.astype(dtype)


def floats(shape: tuple[int, int], dtype: str, seed: int) -> NDArray[Any]:
    """Return random floats; small integers if the dtype is int8."""
    if dtype == "int8":
        return integers(shape, dtype, seed)
    drawn = np.random.default_rng(seed).standard_normal((2, *shape))
    x: NDArray[Any] = drawn[0] + 1j * drawn[1] if dtype.startswith("complex") else drawn[0]
    return x.astype(dtype)


def stores(folder: Path) -> dict[str, Callable[[str, NDArray[Any]], Any]]:
    """Return functions that store an array under a name, each in another way, and return the operand."""

    def chunked(name: str, x: NDArray[Any], **how: Any) -> str:
        path = folder / f"{name}.zarr"
        zarr.create_array(path, data=x, chunks=(5, 7), overwrite=True, **how)
        return str(path)

    def npy(name: str, x: NDArray[Any]) -> str:
        np.save(folder / f"{name}.npy", x)
        return str(folder / f"{name}.npy")

    return {
        "memory": lambda name, x: x,
        "columns": lambda name, x: np.asfortranarray(x),
        "zarr": chunked,
        "raw": partial(chunked, compressors=None),
        "shards": partial(chunked, shards=(20, 14)),
        "v2": partial(chunked, zarr_format=2),
        "npy": npy,
    }


def dense(verb: Callable[..., Any], *operands: Any, **options: Any) -> NDArray[Any]:
    """Return the array that a verb computes."""
    return np.asarray(verb(*operands, **options))


def updated(a: Any, b: Any, c: NDArray[Any], **options: Any) -> NDArray[Any]:
    """Return a copy of C after a product is added to it."""
    return dense(oocgemm.gemm, a, b, c.copy(), alpha=2, beta=3, **options)


def found(verb: Callable[..., Any], *operands: Any, **options: Any) -> tuple[NDArray[Any], ...]:
    """Return the arrays of what a verb selects, or its sums."""
    result = verb(*operands, **options)
    if isinstance(result, np.ndarray):
        return (result,)
    names = "indptr", "indices", "scores", "singular_values"
    return tuple(np.asarray(getattr(result, name)) for name in names if hasattr(result, name))


def products(folder: Path, make: Make, backend: str) -> Iterator[tuple[str, Compute]]:
    """Yield named computations. Each returns an array or a tuple of arrays."""
    gemm = partial(dense, oocgemm.gemm, backend=backend)
    gram = partial(dense, oocgemm.gram, backend=backend)
    for dtype in DTYPES:
        a, b, x = make((M, K), dtype, 1), make((K, N), dtype, 2), make((M, K), dtype, 3)
        for tile in TILES:
            yield f"gemm {dtype} {tile}", partial(gemm, a, b, tile=tile)
            if dtype != "int8":
                c = make((M, N), dtype, 4)
                yield f"gemm {dtype} {tile} beta", partial(updated, a, b, c, tile=tile, backend=backend)
            yield f"gemm {dtype} {tile} T", partial(gemm, a.T, b.T, tile=tile, trans_a="T", trans_b="T")
            yield f"gemm {dtype} {tile} verified", partial(gemm, a, b, tile=tile, verify=True)
        if dtype.startswith("complex"):
            yield f"gemm {dtype} C", partial(gemm, a.T, b, trans_a="C", tile=TILES[0])
        for name, store in stores(folder).items():
            operands, out = (store("a", a), store("b", b)), str(folder / f"{dtype} {name}.zarr")
            yield f"gemm {dtype} {name}", partial(gemm, *operands, tile=TILES[0])
            yield f"gemm {dtype} {name} to zarr", partial(gemm, *operands, out, tile=TILES[0], overwrite=True)
        for tile in SQUARES:
            for uplo in ("lower", "upper", "full"):
                yield f"gram {dtype} {tile} {uplo}", partial(gram, x, uplo=uplo, tile=tile)
        yield f"gram {dtype} axis 1", partial(gram, x, axis=1, uplo="full")
    yield from transformed(make, gemm)
    yield from selections(make, {"backend": backend})
    yield from statistics(make, {"backend": backend})


def transformed(make: Make, gemm: Compute) -> Iterator[tuple[str, Compute]]:
    """Yield products with transforms and epilogues."""
    g, a, b = np.abs(make((M, K), "int8", 5)) % 3, make((M, K), "float64", 10), make((K, N), "float64", 6)
    d, u, v = make((M, N), "float64", 7), make((M, 1), "float64", 8)[:, 0], make((N, 1), "float64", 9)[:, 0]
    g[3, 4] = g[7, 9] = -1
    transforms = {
        "zeros": oocgemm.Transform(missing=-1, impute=0, cast="float64"),
        "means": oocgemm.Transform(missing=-1, impute="mean", cast="float64"),
        "centered": oocgemm.Transform(center=np.arange(float(K)), scale=np.full(K, 2.0), cast="float64"),
    }
    chains: dict[str, list[Any]] = {
        "scale": [oocgemm.Scale(rows=u, cols=v)],
        "rank one": [oocgemm.RankOne(u, v)],
        "add": [oocgemm.Add(d, 2.0)],
        "two": [oocgemm.Scale(rows=u), oocgemm.Add(d)],
    }
    for tile in TILES:
        for name, transform in transforms.items():
            rounded = "rounded " if name == "means" else ""
            yield f"{rounded}transform {name} {tile}", partial(gemm, g, b, transform_a=transform, tile=tile)
        for name, steps in chains.items():
            yield f"epilogue {name} {tile}", partial(gemm, a, b, epilogue=steps, tile=tile)


def selections(make: Make, how: dict[str, Any]) -> Iterator[tuple[str, Compute]]:
    """Yield products of which C is not stored."""
    reductions = {
        f"{kind} {axis}": oocgemm.Reduce(kind, axis) for kind in ("sum", "sumsq", "max") for axis in (0, 1)
    }
    kept: dict[str, dict[str, Any]] = {"topk": {"topk": 4}, "threshold": {"threshold": 6.0}}
    for dtype in ("float32", "float64"):
        a, b, v = make((M, K), dtype, 11), make((K, N), dtype, 12), make((N, 3), dtype, 13)
        sinks: dict[str, Any] = {
            "topk": oocgemm.TopK(4),
            "threshold": oocgemm.Threshold(5.0),
            "absolute": oocgemm.Threshold(6.0, absolute=True),
            "matvec": oocgemm.MatVec(v),
        }
        for tile in TILES:
            for name, sink in {**sinks, **reductions}.items():
                yield (
                    f"reduce {name} {dtype} {tile}",
                    partial(found, oocgemm.reduce, a, b, to=sink, tile=tile, **how),
                )
        for tile in SQUARES:
            for name, given in kept.items():
                yield (
                    f"similarity {name} {dtype} {tile}",
                    partial(found, oocgemm.similarity, a, metric="dot", tile=tile, **given, **how),
                )


def statistics(make: Make, how: dict[str, Any]) -> Iterator[tuple[str, Compute]]:
    """Yield the statistical verbs. Their results are rounded, so they count among the random floats."""
    x = make((M, K), "float64", 14) + np.arange(K) / 7
    g, v = np.abs(make((M, K), "int8", 15)) % 3, make((M, 2), "float64", 16)
    for axis in (0, 1):
        yield f"rounded corr {axis}", partial(dense, oocgemm.corr, x, axis=axis, **how)
        yield f"rounded cov {axis}", partial(dense, oocgemm.cov, x, axis=axis, **how)
    for method in ("gcta", "vanraden"):
        yield f"rounded grm {method}", partial(dense, oocgemm.grm, g, method=method, uplo="full", **how)
    yield "rounded similarity cosine", partial(found, oocgemm.similarity, x, topk=3, **how)
    yield "rounded kernel", partial(dense, oocgemm.kernel_matmul, x, v, gamma=0.01, **how)
    yield "rounded pca", partial(found, oocgemm.pca, x, 3, **how)


def digest(result: Any) -> str:
    """Return a digest of the dtypes, shapes and bytes of one or several arrays."""
    hashed = hashlib.sha256()
    for x in result if isinstance(result, tuple) else (result,):
        whole = np.ascontiguousarray(x)
        hashed.update(f"{whole.dtype.str} {whole.shape}".encode())
        hashed.update((whole + 0 if whole.dtype.kind in "fc" else whole).tobytes())  # -0.0 counts as 0.0
    return hashed.hexdigest()[:16]


def record(make: Make, backend: str, *, rounded: bool) -> dict[str, str]:
    """Run all products and return the digests of their results."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: digest(compute())
            for name, compute in products(Path(folder), make, backend)
            if rounded or not name.startswith("rounded")
        }


def main(command: str, *arguments: str) -> int:
    """Run a command of the module's usage, and return its exit code."""
    if command == "keep":
        kept = record(integers, "host", rounded=False)
        KEPT.write_text(json.dumps(kept, indent=0) + "\n")
    elif command == "record":
        file, backend = arguments[0], (*arguments[1:], "host")[0]
        found = record(integers, backend, rounded=False)
        found |= {f"float {name}": one for name, one in record(floats, backend, rounded=True).items()}
        Path(file).write_text(json.dumps(found, indent=0) + "\n")
    else:
        old, new = (json.loads(Path(file).read_text()) for file in arguments)
        differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        print("\n".join(differ))
        print(f"{len(differ)} of {len({**old, **new})} results differ")
        return int(bool(differ))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
