"""Measure `neighbors` beside `similarity`, and beside what people use instead, by turns in one process.

    python scripts/bench/bench_neighbors.py --backend cuda --rows 200000 --rows 1000000
    python scripts/bench/bench_neighbors.py --backend host --rows 20000

X is a float32 array of random numbers in memory. Each row gets its nearest rows. The others are, where they
are installed:

- "loop": PyTorch, or else CuPy, on a GPU, and NumPy on the host. Blocks of products give squared distances,
  of which the smallest are kept. The distances are not computed again.
- "scikit-learn": `NearestNeighbors(algorithm="brute")`, and "faiss": `IndexFlatL2`, both on the host.

Some rows of all results are compared with exact distances: those of `neighbors` must be right, and the
largest error of the others is kept. The first round is not counted. The results go to a JSON file with a key
per case. Other cases in the file are kept.
"""

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from keeping import keep, output

import oocgemm

Array = Any
# Rows that a loop multiplies together, and rows that are compared.
BAND, COMPARED = {"cuda": 4096, "host": 1024}, 50
# A contender that takes more elements of the product than this is left out.
MOST = {"loop": 2.0e12, "scikit-learn": 1e10, "faiss": 1e10}


def on_gpu(x: Array, topk: int) -> Array:
    """Return distances to the nearest other rows: by PyTorch, or by CuPy if it is not installed."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return with_arrays(importlib.import_module("cupy"), x, topk, BAND["cuda"]).get()
    with torch.no_grad():
        there = torch.from_numpy(x).cuda()
        squares, found = (there * there).sum(1), []
        for top in range(0, len(x), BAND["cuda"]):
            band = slice(top, top + BAND["cuda"])
            apart = torch.addmm(squares[None], there[band], there.T, alpha=-2)
            apart += squares[band, None]
            found.append(apart.topk(topk + 1, largest=False).values.cpu())
        return torch.cat(found).clamp(min=0).sqrt().numpy()[:, 1:]


def with_arrays(numpy: Any, x: Array, topk: int, height: int) -> Array:
    """Return the same by NumPy or CuPy."""
    there = numpy.asarray(x)
    squares, found = (there * there).sum(1), []
    for top in range(0, len(x), height):
        band = slice(top, top + height)
        apart = there[band] @ there.T
        apart *= -2
        apart += squares
        apart += squares[band, None]
        best = numpy.partition(apart, topk, axis=1)[:, : topk + 1]
        found.append(numpy.sort(best, axis=1)[:, 1:])
    return numpy.sqrt(numpy.maximum(numpy.concatenate(found), 0))


def by_sklearn(x: Array, topk: int) -> Array:
    neighbors: Any = importlib.import_module("sklearn.neighbors")
    found = neighbors.NearestNeighbors(n_neighbors=topk, algorithm="brute").fit(x)
    return found.kneighbors()[0]


def by_faiss(x: Array, topk: int) -> Array:
    index = importlib.import_module("faiss").IndexFlatL2(x.shape[1])
    index.add(x)
    return np.sqrt(index.search(x, topk + 1)[0][:, 1:])


def contenders(x: Array, topk: int, backend: str) -> dict[str, Callable[[], Array]]:
    """Return what is measured, by its name. Each returns distances."""
    run: dict[str, Callable[[], Any]] = {
        "similarity": lambda: oocgemm.similarity(x, topk=topk, backend=backend).scores,
        "neighbors": lambda: oocgemm.neighbors(x, topk=topk, backend=backend).distances,
        "cosine": lambda: oocgemm.neighbors(x, topk=topk, metric="cosine", backend=backend).distances,
    }
    others: dict[str, Callable[[], Any]] = {"loop": lambda: on_gpu(x, topk)}
    if backend == "host":
        others["loop"] = lambda: with_arrays(np, x, topk, BAND["host"])
        for name, module, act in (("scikit-learn", "sklearn", by_sklearn), ("faiss", "faiss", by_faiss)):
            if importlib.util.find_spec(module) is not None:
                others[name] = lambda act=act: act(x, topk)  # type: ignore[misc]
    return run | {name: act for name, act in others.items() if len(x) ** 2 <= MOST[name]}


def device(backend: str) -> str:
    """Return the name of the GPU that is used; "" for the host."""
    if backend == "host":
        return ""
    runtime = importlib.import_module("cupy").cuda.runtime
    return str(runtime.getDeviceProperties(0)["name"].decode())


def errors(x: Array, found: dict[str, Array], topk: int) -> dict[str, float]:
    """Return the largest error of each result in some rows, in units of the distance. Check `neighbors`."""
    worst = dict.fromkeys(found, 0.0)
    for row in np.linspace(0, len(x) - 1, COMPARED).astype(int):
        exact = np.concatenate(
            [np.square(x[top : top + 65536].astype(float) - x[row]).sum(1) for top in range(0, len(x), 65536)]
        )
        exact[row] = np.inf
        right = np.sqrt(np.partition(exact, topk)[:topk])
        right.sort()
        for name, distances in found.items():
            worst[name] = max(worst[name], float(np.abs(distances[row] / right - 1).max()))
    assert worst["neighbors"] < 1e-7, worst
    return worst


@click.command()
@click.option("--backend", default="cuda", show_default=True)
@click.option("--rows", multiple=True, default=(200_000,), show_default=True)
@click.option("--depth", default=128, show_default=True)
@click.option("--topk", default=10, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@output
def main(
    backend: str, rows: tuple[int, ...], depth: int, topk: int, rounds: int, output: Path | None
) -> None:
    """Measure all cases."""
    for count in rows:
        x = np.random.default_rng(0).standard_normal((count, depth), np.float32)
        run = contenders(x, topk, backend)
        seconds: dict[str, list[float]] = {name: [] for name in run}
        found: dict[str, Array] = {}
        for turn in range(rounds + 1):
            for name, act in run.items():
                begun = time.perf_counter()
                result = act()
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
                elif name not in ("similarity", "cosine"):
                    found[name] = result
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        ratio = {name: taken / medians["similarity"] for name, taken in medians.items()}
        case = f"{backend} float32 {count}x{depth} top {topk}"
        kept = {"median_seconds": medians, "to_similarity": ratio, "errors": errors(x, found, topk)}
        place = output or Path("scripts/bench/results/bench_neighbors.json")
        keep(place, case, kept | {"seconds": seconds, "device": device(backend)})
        print(case, json.dumps(kept, indent=1), flush=True)


if __name__ == "__main__":
    main()
