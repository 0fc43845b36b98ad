#!/usr/bin/env python
"""Check calibrations and probes: rates beside ceilings of the links, predicted times, and times of products.

First the machine is probed and calibrated. The rates are printed beside those of `grid_ceilings.links`. Then
products of `bench_grid.py` run with three kinds of rates, in turns: assumed, probed and calibrated. Two
ratios are printed: of the medians to those with assumed rates, and of predicted to measured times. The
rates are kept in a temporary folder: those of the user are neither used nor changed. Products that take less
time come first, so that --limit leaves out the long ones.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import grid_ceilings
from bench_grid import LINK_BYTES, shrunk
from grid_cases import COLD, CUDA, HOST, IN_MEMORY, PINNED, Case, chosen
from grid_data import Files, Operands
from grid_runs import free_memory, one_call, pinned, release
from keeping import keep, output, work

import oocgemm
from oocgemm import backends
from oocgemm.jobs import run as running
from oocgemm.machine import info
from oocgemm.machine.calibrate import calibrate
from oocgemm.planning import default_model
from oocgemm.system import cache
from oocgemm.system.installed import compiled

MIN_SECONDS = 0.02  # shorter products say nothing about rates
KINDS = ("assumed", "probed", "measured")
# Rates of a calibration, each with the ceiling that it is compared with.
CEILINGS = {
    "h2d": "h2d_both",
    "d2h": "d2h_both",
    "memory": "stage",
    "read": "page_read",
    "write": "disk_write",
}


def seconds(case: Case) -> float:
    """Estimate how long a product takes on a GPU."""
    rate = 40e9 if case.source in IN_MEMORY else 10e9 if case.source not in COLD else 1e9
    return (case.operand_bytes + case.c_bytes) / rate + case.flops / 50e12


@contextmanager
def rates_of(kind: str, folder: Path) -> Iterator[None]:
    """Let the calls in the context use one kind of rates."""
    before = {name: os.environ.get(name) for name in ("OOCGEMM_CACHE", "OOCGEMM_PROBE")}
    os.environ |= {"OOCGEMM_CACHE": str(folder / kind), "OOCGEMM_PROBE": "1" if kind == "probed" else "0"}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def probed(backend: str, folder: Path) -> dict[str, Any]:
    """Probe the machine, and store the rates for the kind "probed"."""
    engine = backends.open_backend(backend, 0)
    defaults = default_model(backend, len(os.sched_getaffinity(0)), compiled() is not None)
    started = time.perf_counter()
    found = info.measure_probe(engine, defaults)
    seconds = time.perf_counter() - started
    with rates_of("probed", folder):
        info.keep_probe(engine, found)
    print(f"the probe took {seconds:.2f} s: {found}")
    return {"seconds": seconds, "factors": found}


def calibrated(backend: str, folder: Path, work: Path, small: bool) -> dict[str, Any]:
    """Calibrate, store the rates for the kind "measured", and compare them with the ceilings."""
    started = time.perf_counter()
    found = calibrate(backend, path=work)
    seconds = time.perf_counter() - started
    with rates_of("measured", folder):
        cache.save(found)
    free_memory()
    size = LINK_BYTES >> (5 if small else 0)
    links = grid_ceilings.links(work, size, backend == "cuda", True) | {"stage": grid_ceilings.staged(size)}
    free_memory()
    (storage,) = found.stores.values()
    rates = dict(found.rates) | {"read": storage.read, "write": storage.write}
    compared = {
        name: {"calibrated": rates[name], "ceiling": links[ceiling], "ratio": rates[name] / links[ceiling]}
        for name, ceiling in CEILINGS.items()
        if name in rates and ceiling in links
    }
    print(f"calibration took {seconds:.1f} s")
    for name, one in compared.items():
        print(
            f"{name:8} {one['calibrated'] / 1e9:7.2f} GB/s, ceiling {one['ceiling'] / 1e9:7.2f}, "
            f"ratio {one['ratio']:.2f}"
        )
    return {"seconds": seconds, "links": compared, "rates": rates}


def measured(
    case: Case, backend: str, folder: Path, operands: Operands, files: Files, repeats: int
) -> dict[str, Any]:
    """Run a product with all kinds of rates in turns. Return the samples, and the predicted times."""
    arrays = operands.make(case)
    paths = [] if case.source in IN_MEMORY else [str(path) for path in files.store(case, *arrays[:2])]

    def call(kind: str) -> tuple[float, oocgemm.Result]:
        running.forget()  # what was prepared with rates of another kind
        with rates_of(kind, folder):
            return one_call(case, paths, arrays, backend)

    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    predicted = dict[str, float]()
    with pinned(*(arrays if case.source == PINNED else ())):
        for turn in range(repeats + 1):
            for kind in KINDS:
                seconds, result = call(kind)
                predicted[kind] = result.plan.prediction.total
                if turn:  # the first call with rates of a kind plans with them
                    samples[kind].append(seconds)
    release()
    ratios = {kind: median(samples[kind]) / median(samples["assumed"]) for kind in KINDS}
    return {"samples": samples, "ratios": ratios, "predicted": predicted}


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "host"]), default="cuda", show_default=True)
@click.option("--only", default="", help="Only products whose names contain this, such as 'float64 pinned'.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--limit", type=float, help="Start no further product after this many seconds.")
@click.option("--shrink", default=1, help="Divide all extents by this number: to try the script.")
@work
@output
def main(
    backend: str,
    only: str,
    repeats: int,
    limit: float | None,
    shrink: int,
    work: Path | None,
    output: Path | None,
) -> None:
    started = time.perf_counter()
    cases = [shrunk(case, shrink) for case in chosen(CUDA if backend == "cuda" else HOST, only)]
    cases = sorted((case for case in cases if shrink > 1 or seconds(case) > MIN_SECONDS), key=seconds)
    with tempfile.TemporaryDirectory(prefix="oocgemm-rates-", dir=work or ".") as temporary:
        folder = Path(temporary).absolute()
        result: dict[str, Any] = {"probe": probed(backend, folder)}
        result["calibration"] = calibrated(backend, folder, folder, shrink > 1)
        operands, files, done = Operands(), Files(folder), dict[str, Any]()
        print(f"{'product':58} {'T':>8} {'probed':>8} {'measured':>9}   predicted / T of each kind")
        for case in cases:
            if limit is not None and time.perf_counter() - started > limit:
                break
            try:
                one = done[case.name] = measured(case, backend, folder, operands, files, repeats)
            except Exception as error:  # the others are measured all the same
                print(f"{case.name:58} {error!r}", flush=True)
                release()
                free_memory()
                continue
            t, ratios = median(one["samples"]["assumed"]), one["ratios"]
            errors = (one["predicted"][kind] / median(one["samples"][kind]) for kind in KINDS)
            print(
                f"{case.name:58} {t:8.4f} {ratios['probed']:8.3f} {ratios['measured']:9.3f}   "
                + " ".join(f"{error:6.2f}" for error in errors),
                flush=True,
            )
        for kind in KINDS:
            ratios = {name: one["ratios"][kind] for name, one in done.items()}
            errors = [one["predicted"][kind] / median(one["samples"][kind]) for one in done.values()]
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                mean = geometric_mean(ratios.values())
                print(
                    f"{kind}: T / T assumed {mean:.3f}, worst {ratios[worst]:.3f} ({worst}); predicted / T "
                    f"{geometric_mean(errors):.2f} ({min(errors):.2f} to {max(errors):.2f})"
                )
                result[kind] = {"geometric_mean": mean, "worst": [worst, ratios[worst]], "predicted": errors}
        keep(output, f"{backend} rates", result | {"cases": done})


if __name__ == "__main__":
    main()
