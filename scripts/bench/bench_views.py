"""Measure views beside plain matrices: a folded array of three dimensions, and a matrix in several files.

    python scripts/bench/bench_views.py --rounds 9 --work /dev/shm --output results.json

A matrix of float32 is stored as one zarr array of two dimensions; as an array of three, whose chunks have the
same elements; as one whose chunks cut both folded axes, which is read box by box; and as 22 arrays. Products
with a narrow B are computed by turns, so that most of the time is spent on reading. The same for genotypes in
one .bed file and in 22, with relationships. Results are compared. Medians and ratios to the plain matrix go
to a JSON file.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from keeping import keep, output, work
from numpy.typing import NDArray

import oocgemm

Array = NDArray[Any]
FILES = 22
ROWS, VARIANTS = 600, 4000  # of each file


def by_turns(cases: dict[str, Callable[[], Array]], rounds: int) -> dict[str, Any]:
    """Time cases by turns, after a round that is not counted. Return medians, minima and ratios of both."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    first = next(iter(cases))
    for number in range(rounds + 1):
        results = {}
        for name, call in cases.items():
            start = time.perf_counter()
            results[name] = call()
            if number:
                times[name].append(time.perf_counter() - start)
        for found in results.values():
            np.testing.assert_allclose(found, results[first], rtol=1e-4, atol=1e-4)
    medians = {name: statistics.median(each) for name, each in times.items()}
    minima = {name: min(each) for name, each in times.items()}
    return {
        "median": medians,
        "minimum": minima,
        "ratio": {name: medians[name] / medians[first] for name in cases},
        "ratio of minima": {name: minima[name] / minima[first] for name in cases},
    }


def arrays(folder: Path, compressor: str | None) -> dict[str, Callable[[], Array]]:
    """Store a matrix in several ways. Return a product of each."""
    times, lat, lon, high = FILES * ROWS, 50, 100, 100
    x = np.random.default_rng(0).integers(0, 9, (times, lat, lon), np.int8).astype(np.float32)
    flat, b = x.reshape(times, -1), np.ones((lat * lon, 16), np.float32)
    options: dict[str, Any] = {
        "compressors": {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    }
    if compressor is None:
        options = {"compressors": None}
    zarr.create_array(folder / "2.zarr", data=flat, chunks=(high, lat * lon), **options)
    zarr.create_array(folder / "3.zarr", data=x, chunks=(high, lat, lon), **options)
    zarr.create_array(folder / "boxes.zarr", data=x, chunks=(high, lat // 2, lon // 2), **options)
    for part in range(FILES):
        rows = flat[part * ROWS : (part + 1) * ROWS]
        zarr.create_array(folder / f"part{part}.zarr", data=rows, chunks=(high, lat * lon), **options)
    operands = {
        "plain": str(folder / "2.zarr"),
        "folded": oocgemm.as_matrix(str(folder / "3.zarr"), rows=[0]),
        "files": oocgemm.concat([str(folder / f"part{part}.zarr") for part in range(FILES)]),
        "boxes": oocgemm.as_matrix(str(folder / "boxes.zarr"), rows=[0]),
    }

    def product(operand: Any) -> Callable[[], Array]:
        return lambda: np.asarray(oocgemm.gemm(operand, b, backend="host", memory="256MiB"))

    return {name: product(operand) for name, operand in operands.items()}


def genotypes(folder: Path) -> dict[str, Callable[[], Array]]:
    """Store genotypes in one .bed file and in several. Return the relationships from each."""
    people, variants = 800, FILES * VARIANTS
    packed = np.random.default_rng(0).integers(0, 256, (variants, people // 4), np.uint8)
    for pair in range(4):  # no genotype is missing, which the bits 01 would stand for
        packed[(packed >> 2 * pair & 3) == 1] |= 3 << 2 * pair
    parts = [(f"chr{part}", packed[part * VARIANTS : (part + 1) * VARIANTS]) for part in range(FILES)]
    for name, lines in (("whole", packed), *parts):
        (folder / f"{name}.bed").write_bytes(b"\x6c\x1b\x01" + lines.tobytes())
        (folder / f"{name}.fam").write_text("".join(f"F{i} I{i} 0 0 0 -9\n" for i in range(people)))
        (folder / f"{name}.bim").write_text("".join(f"1\trs{j}\t0\t{j}\tA\tG\n" for j in range(len(lines))))
    joined = oocgemm.concat([str(folder / f"{name}.bed") for name, _ in parts], axis=1)
    operands = {"plain": str(folder / "whole.bed"), "files": joined}

    def relate(operand: Any) -> Callable[[], Array]:
        return lambda: np.asarray(oocgemm.grm(operand, backend="host", memory="512MiB"))

    return {name: relate(operand) for name, operand in operands.items()}


@click.command()
@click.option("--rounds", default=9)
@work
@output
def main(rounds: int, work: Path | None, output: Path | None) -> None:
    """Measure views beside plain matrices."""
    folder = Path(tempfile.mkdtemp(dir=work))
    try:
        for key, make in (
            ("raw", lambda where: arrays(where, None)),
            ("zstd", lambda where: arrays(where, "zstd")),
            ("genotypes", genotypes),
        ):
            (where := folder / key).mkdir()
            found = by_turns(make(where), rounds)
            for name, ratio in found["ratio"].items():
                click.echo(f"{key:10}{name:8}{found['median'][name]:8.3f} s  {ratio:6.3f}")
            keep(output, key, {"rounds": rounds} | found)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
