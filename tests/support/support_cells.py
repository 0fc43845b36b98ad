"""Run the combinations of docs/reference/support.md on small integers, and check their results."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from support import Cell  # type: ignore[import-not-found]

import oocgemm
from oocgemm.jobs.options import options_of
from oocgemm.service.dispatcher import Dispatcher
from oocgemm.service.job_arguments import checked
from oocgemm.service.job_planner import planned
from oocgemm.service.job_spec import encoded, out_of, parameters, place_of
from oocgemm.service.job_store import JobStore, NewJob
from oocgemm.service.protocol import State
from tests.support.fake_cuda import fake_cuda
from tests.support.services import LIMITS, run_all
from tests.support.sparse_files import stored
from tests.support.web_files import web_server

Array = Any
TRANSFORM = oocgemm.Transform(center="k")
GAMMA = 0.125
# 16 x 20 and 20 x 12 numbers from 0 to 2: also genotypes.
A, B = (
    np.random.default_rng(n).integers(0, 3, s).astype(np.float64) for n, s in ((1, (16, 20)), (2, (20, 12)))
)
MAX_STEPS = 6  # after which a run is interrupted: more than a tile has, fewer than all tiles or passes
V = np.arange(-5.0, 11.0)
Y = np.arange(20.0) % 7
FITS = {"svd", "lstsq", "ridge"}  # verbs of an X with more rows than columns, which is B
# The array that is compared, of those that a job saves.
ARRAYS = {
    **{"similarity": "scores", "neighbors": "distances", "pca": "singular_values"},
    **dict.fromkeys(FITS, "coefficients"),
    "svd": "singular_values",
}
EXECUTORS: Mapping[str, dict[str, Any]] = {
    "host": {},
    "devices": {"devices": "0,0"},
    "workers": {"workers": 2, "memory": "400MiB"},
}


class Call:
    """How a verb is called on the operands A (or X), B and `more`, and what its result must be."""

    def __init__(
        self,
        call: Callable[..., Any],
        result: Callable[[Any], Array],
        expected: Callable[[Array], Array],
        *,
        more: tuple[Array, ...] = (),
        stores: bool = True,
        tiles: bool = True,
        **options: Any,
    ) -> None:
        self.call, self.result, self.expected, self.more = call, result, expected, more
        self.stores, self.tiles, self.options = stores, tiles, options


def _correlation(x: Array) -> Array:
    return np.corrcoef(x)


def _cosines(x: Array) -> Array:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    found = unit @ unit.T
    np.fill_diagonal(found, -np.inf)
    return np.sort(found, axis=1)[:, ::-1][:, :3]


def _relationships(x: Array) -> Array:
    p = x.mean(axis=0) / 2
    z = (x - 2 * p) / np.sqrt(2 * p * (1 - p))
    return z @ z.T / x.shape[1]


def _kinship(x: Array) -> Array:
    hets = (x == 1).sum(axis=1)
    return 0.5 - np.square(x[:, None] - x).sum(axis=2) / (4 * np.minimum(hets[:, None], hets))


def _kernel(x: Array) -> Array:
    squares = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    return np.exp(-GAMMA * squares) @ V


def _ld_scores(x: Array) -> Array:
    squares = np.corrcoef(x.T) ** 2
    near = np.abs(np.subtract.outer(*2 * (np.arange(len(squares)),))) <= 3
    return np.where(near, squares, 0).sum(axis=1)


def _ld(x: Array) -> Array:
    r = np.corrcoef(x.T)
    later = np.subtract.outer(*2 * (np.arange(len(r)),)).T
    return np.where((later > 0) & (later <= 3) & (r * r >= 0.02), r, 0)


def _dense(found: Any) -> Array:
    c = np.zeros((len(found.indptr) - 1,) * 2)
    c[np.repeat(np.arange(len(c)), np.diff(found.indptr)), found.indices] = found.r
    return c


def _distances(x: Array) -> Array:
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))


CALLS: Mapping[str, Call] = {
    "gemm": Call(oocgemm.gemm, lambda found: found.out, lambda a: a @ B),
    "gram": Call(oocgemm.gram, lambda found: found.out, lambda x: x @ x.T),
    "corr": Call(oocgemm.corr, lambda found: found.out, _correlation),
    "cov": Call(oocgemm.cov, lambda found: found.out, np.cov),
    "similarity": Call(oocgemm.similarity, lambda found: found.scores, _cosines, stores=False, topk=3),
    "neighbors": Call(
        oocgemm.neighbors,
        lambda found: found.distances,
        lambda x: np.sort(_distances(x))[:, 1:4],
        stores=False,
        topk=3,
    ),
    "distances": Call(oocgemm.distances, lambda found: found.out, _distances),
    "grm": Call(oocgemm.grm, lambda found: found.out, _relationships),
    "king": Call(oocgemm.king, lambda found: found.out, _kinship),
    "ibs": Call(oocgemm.ibs, lambda found: found.out, lambda x: 1 - np.abs(x[:, None] - x).mean(2) / 2),
    "pca": Call(
        oocgemm.pca,
        lambda found: found.singular_values,
        lambda x: np.linalg.svd(x - x.mean(axis=0), compute_uv=False)[:3],
        tiles=False,
        method="randomized",  # the exact method has one pass, so there is none to resume after
        k=3,
        tol=1e-9,
        oversampling=2,
        iterations=200,
    ),
    "svd": Call(
        oocgemm.svd,
        lambda found: found.singular_values,
        lambda x: np.linalg.svd(x, compute_uv=False),
        stores=False,
        tiles=False,
        k=12,
    ),
    "lstsq": Call(
        oocgemm.lstsq,
        lambda found: found.coefficients,
        lambda x: np.linalg.lstsq(x, Y)[0],
        more=(Y,),
        stores=False,
        tiles=False,
    ),
    "ridge": Call(
        oocgemm.ridge,
        lambda found: found.coefficients,
        lambda x: np.stack([np.linalg.solve(x.T @ x + a * np.eye(x.shape[1]), x.T @ Y) for a in (0.5, 2)]),
        more=(Y,),
        stores=False,
        tiles=False,
        alpha=(0.5, 2),
    ),
    "kernel_matmul": Call(
        oocgemm.kernel_matmul, lambda found: found, _kernel, more=(V,), stores=False, gamma=GAMMA
    ),
    "reduce": Call(
        oocgemm.reduce,
        lambda found: found,
        lambda a: (a @ B).sum(axis=1),
        stores=False,
        to=oocgemm.Reduce("sum"),
    ),
    "ld": Call(oocgemm.ld, _dense, _ld, stores=False, window=3, min_r2=0.02),
    "ld_scores": Call(oocgemm.ld_scores, lambda found: found.scores, _ld_scores, stores=False, window=3),
}


def run(cell: Cell, folder: Path) -> None:
    """Compute a combination with arrays in a folder. Raises `AssertionError` if its result is wrong."""
    with ExitStack() as stack:
        kinds = ("uint8", "int16") if cell.operand == "mixed" else ("float64", "float64")
        a, b = (
            _stored(cell, folder, name, array.astype(kind), stack)
            for name, array, kind in zip("ab", (A, B), kinds, strict=True)
        )
        # Centers are per index along k: per row where columns are compared.
        mean = A.mean(axis=1, keepdims=True) if cell.verb in ("ld", "ld_scores") else A.mean(axis=0)
        if cell.verb in FITS:
            a, expected = b, CALLS[cell.verb].expected(B)
        else:
            expected = CALLS[cell.verb].expected(A - mean if cell.operand == "transformed" else A)
        found = (_job if cell.executor == "service" else _call)(cell, folder, a, b, stack)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def _stored(cell: Cell, folder: Path, name: str, array: Array, stack: ExitStack) -> Any:
    """Store an operand; return its path or URL, or a description of it."""
    if cell.operand == "n-d":
        zarr.create_array(folder / f"{name}.zarr", data=array.reshape(len(array), 2, -1), chunks=(8, 2, 3))
        return oocgemm.as_matrix(str(folder / f"{name}.zarr"), rows=[0])
    if cell.operand == "concatenated":
        for number, part in enumerate((array[:7], array[7:])):
            zarr.create_array(folder / f"{name}{number}.zarr", data=part, chunks=(8, 8))
        return oocgemm.concat([str(folder / f"{name}{number}.zarr") for number in range(2)])
    if cell.operand == "kept":
        spread = np.ones((2 * len(array), array.shape[1] + 3))
        spread[1::2, 3:] = array
        zarr.create_array(folder / f"{name}.zarr", data=spread, chunks=(8, 8))
        return oocgemm.keep(
            str(folder / f"{name}.zarr"), np.arange(len(spread)) % 2 > 0, np.arange(3, spread.shape[1])
        )
    if cell.operand == "sparse":
        return str(stored(folder, f"{name}.h5ad", array, "csr"))
    options: Any = {} if cell.operand == "compressed" else {"compressors": None}
    if cell.operand == "packed":
        array = (2 * (array - 1)).astype("int16")
        options["attributes"] = {"scale_factor": 0.5, "add_offset": 1.0}
    zarr.create_array(folder / f"{name}.zarr", data=array, chunks=(8, 8), **options)
    if cell.operand == "remote":
        return f"{stack.enter_context(web_server(folder))}/{name}.zarr"
    return str(folder / f"{name}.zarr")


def _call(cell: Cell, folder: Path, a: Any, b: Any, stack: ExitStack) -> Array:
    """Return what the verb computes. With the mode "resume", the first run is interrupted."""
    verb, options = CALLS[cell.verb], dict(CALLS[cell.verb].options)
    operands: list[Any] = [a, b] if cell.verb in ("gemm", "reduce") else [a]
    operands += verb.more
    options |= _transform(cell)
    if verb.stores and (cell.mode == "resume" or cell.executor == "workers"):
        options["c" if cell.verb == "gemm" else "out"] = str(folder / "c.zarr")
    if verb.tiles:
        options["tile"] = "8x8x8"
    if cell.mode == "verify":
        options["verify"] = True
    if cell.executor == "device":
        stack.enter_context(fake_cuda())
        options |= {"backend": "cuda", "kernel": "cublas"}
    else:
        options |= {"backend": "host"} | EXECUTORS[cell.executor]
    if cell.mode == "resume":
        with _interrupted(options) as once:
            verb.call(*operands, **once)
        options["resume"] = True
    return np.asarray(verb.result(verb.call(*operands, **options)))


def _transform(cell: Cell) -> dict[str, Any]:
    if cell.operand != "transformed":
        return {}
    return {"transform_a" if "transform_a" in options_of(cell.verb) else "transform": TRANSFORM}


@contextmanager
def _interrupted(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield options with which a run is interrupted after some operations, as by Ctrl-C."""
    kinds: list[str] = []

    def observe(span: Any) -> None:
        kinds.append(span.kind)
        if kinds.count("write") > 1 or kinds.count("multiply") > MAX_STEPS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        yield dict(options) | {"progress": lambda plan: observe}


def _job(cell: Cell, folder: Path, a: Any, b: Any, stack: ExitStack) -> Array:
    """Return what a job of a service computes."""
    verb = CALLS[cell.verb]
    given = [a, b] if cell.verb in ("gemm", "reduce") else [a]
    for number, array in enumerate(verb.more):
        np.save(folder / f"more{number}.npy", array)
        given.append(str(folder / f"more{number}.npy"))
    names = parameters(cell.verb)
    spec = dict(zip(names, given, strict=False)) | {"verb": cell.verb}
    options = dict(verb.options) | _transform(cell) | {"verify": True if cell.mode == "verify" else None}
    for name in names.keys() & options.keys():
        spec[name] = options.pop(name)
    sums = not verb.stores and cell.verb not in (*ARRAYS, "ld")
    out = spec[place_of(cell.verb)] = str(folder / ("c.npy" if sums or cell.verb == "gemm" else "c.zarr"))
    plain = {name: encoded(name, value) for name, value in spec.items()}
    plain["options"] = {name: encoded(name, value) for name, value in options.items() if value is not None}
    found = planned(checked(plain), LIMITS, "host")
    store = JobStore(folder / "db")
    dispatcher = Dispatcher(store, folder, lambda: LIMITS)
    new = NewJob(
        owner="user", spec=found.spec, plan=found.summary, need=found.need, seconds=found.seconds,
        c_path=out_of(found.spec),
    )  # fmt: skip
    try:
        store.submit([new])
        (job,) = run_all(dispatcher, store)
    finally:
        dispatcher.close()
    assert job.state is State.SUCCEEDED, job.error
    if out.endswith(".npy"):
        return np.load(out)
    stored: Any = zarr.open(out, mode="r")
    if cell.verb == "ld":
        starts, indices, r = (np.asarray(stored[name]) for name in ("indptr", "indices", "data"))
        return _dense(SimpleNamespace(indptr=starts, indices=indices, r=r))
    return np.asarray(stored if isinstance(stored, zarr.Array) else stored[ARRAYS[cell.verb]])
