"""Measure relationship matrices of genotypes in a .bed file, beside the same genotypes in a zarr array.

    python scripts/bench/bench_genotypes.py --backend cuda --individuals 20000 --variants 100000
    python scripts/bench/bench_genotypes.py --backend host --individuals 4000 --variants 40000

1% of the genotypes are missing. The array has raw chunks of int8, four times the bytes of the file, and both
are in the page cache. Cases run in turns, and the seconds are those of the product: the pass for the allele
frequencies comes before, and is measured once. "int8" is the plain Gram matrix of the array, without a
transform. The first relationships are compared with NumPy. The results go to a JSON file with a key per case.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output

import oocgemm
from oocgemm.stores.genetics import open_bed

# Individuals whose relationships are compared, variants that are copied at a time, and different variants.
COMPARED, BAND, LINES = 64, 2048, 256


def make(folder: Path, individuals: int, variants: int) -> None:
    """Write the genotypes as x.bed and as x.zarr."""
    rng = np.random.default_rng(0)
    whole = zarr.create_array(
        folder / "x.zarr", shape=(individuals, variants), chunks=(4096, 2048), dtype="int8", compressors=None
    )
    # Bytes of four genotypes. A variant is one of these lines, from another individual on.
    lines = np.empty((LINES, -(-individuals // 4)), np.uint8)
    for line, p in zip(lines, rng.uniform(0.1, 0.9, LINES), strict=True):
        each = np.array([p * p, 0.01, 2 * p * (1 - p), (1 - p) ** 2])
        codes = rng.choice(4, (4, len(line)), p=each / each.sum()).astype(np.uint8)
        line[:] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    with (folder / "x.bed").open("wb") as file:
        file.write(b"\x6c\x1b\x01")
        for variant in range(variants):
            file.write(np.roll(lines[variant % LINES], variant // LINES * 7))
    (folder / "x.fam").write_text("".join(f"{i} {i} 0 0 0 -9\n" for i in range(individuals)))
    (folder / "x.bim").write_text("1 . 0 0 A G\n" * variants)
    stored = open_bed("X", folder / "x.bed").transposed()
    for first in range(0, variants, BAND):
        last = min(variants, first + BAND)
        part = np.empty((last - first, individuals), np.int8)
        stored.read((first, last), (0, individuals), part)
        whole[:, first:last] = part.T


def check(folder: Path, found: Any) -> float:
    """Compare relationships with NumPy in float64. Return the root of the mean squared difference."""
    stored = open_bed("X", folder / "x.bed").transposed()
    total, variants = np.zeros((COMPARED, COMPARED)), stored.shape[0]
    mean = oocgemm.stats(folder / "x.bed", missing=-1).mean
    for first in range(0, variants, BAND):
        last = min(variants, first + BAND)
        part = np.empty((last - first, COMPARED), np.int8)
        stored.read((first, last), (0, COMPARED), part)
        at = mean[first:last, None]
        z = np.where(part == -1, 0, (part - at) / np.sqrt(at * (1 - at / 2)))
        total += z.T @ z
    difference = np.asarray(found[:COMPARED, :COMPARED], float) - total / variants
    return float(np.sqrt(np.mean(np.tril(difference) ** 2)))


@click.command()
@click.option("--backend", default="cuda", show_default=True)
@click.option("--individuals", default=20_000, show_default=True)
@click.option("--variants", default=100_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--device-memory")
@click.option("--casts", default="float16,float32", show_default=True)
@output
def main(
    backend: str,
    individuals: int,
    variants: int,
    rounds: int,
    device_memory: str | None,
    casts: str,
    output: Path | None,
) -> None:
    given: Any = {"backend": backend, "device_memory": device_memory, "uplo": "lower", "overwrite": True}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        started = time.perf_counter()
        make(folder, individuals, variants)
        print(f"made in {time.perf_counter() - started:.1f} s", flush=True)
        small = np.zeros((256, 512), np.int8)
        small[::2] = 1
        for cast in casts.split(","):  # loads libraries and kernels
            oocgemm.grm(small, backend=backend, cast=cast)
        passes: dict[str, float] = {}
        for kind in ("bed", "zarr"):
            started = time.perf_counter()
            oocgemm.stats(folder / f"x.{kind}", missing=-1)
            passes[kind] = time.perf_counter() - started
        print("passes for frequencies", passes, flush=True)
        cases: dict[str, Any] = {
            f"{kind} {cast}": (oocgemm.grm, kind, {"cast": cast})
            for cast in casts.split(",")
            for kind in ("bed", "zarr")
        } | {"zarr int8": (oocgemm.gram, "zarr", {})}
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        errors, facts = {}, {}
        for _ in range(rounds):
            for case, (function, kind, options) in cases.items():
                found = function(folder / f"x.{kind}", folder / f"{case}.npy", **options, **given)
                seconds[case].append(found.report.wall)
                plan = found.plan
                facts[case] = {
                    "compute_share": found.report.compute_share,
                    "exposed": found.report.exposed,
                    "plan": f"tile {plan.tile}, grid {plan.grid.shape}, {plan.candidate.traversal}",
                    "predicted_seconds": plan.prediction.total,
                    "traffic": plan.traffic,
                }
                if function is oocgemm.grm and case not in errors:
                    errors[case] = check(folder, found.out)
                del found
                oocgemm.release()
                print(case, round(seconds[case][-1], 3), flush=True)
    result = {
        "what": f"X {individuals} x {variants}, 1% missing",
        "passes_seconds": passes,
        "samples_seconds": seconds,
        "median_seconds": {case: statistics.median(values) for case, values in seconds.items()},
        "rms_errors": errors,
        "runs": facts,
    }
    name = f"{backend} {individuals}x{variants}"
    keep(output or Path("scripts/bench/results/bench_genotypes.json"), name, result)
    print(name, json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
