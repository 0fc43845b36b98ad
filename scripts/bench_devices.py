"""Measure runs on several GPUs of one host: time, bytes read, and whether C has the bits of one GPU.

    python scripts/bench_devices.py --devices 0 --devices 0,0 --devices all --folder /dev/shm/devices
    python scripts/bench_devices.py --devices 0 --devices all --in-memory
    python scripts/bench_devices.py --size 2000 --backend host --devices 0 --devices 0,0 --tile 500x500x250

A and B have small integers, so that C is exact whatever the tiles are. They are zarr arrays with raw chunks
in a folder, or NumPy arrays. The first `--devices` are the reference: speeds and bytes read are relative to
theirs, and every C must equal theirs. Runs take turns, `--samples` times, after a round that is not counted.
Per GPU, the script prints the share of the time in which it multiplied.
"""

import shutil
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr

import oocgemm
from oocgemm.timeline import report

# Rows that are filled at a time.
BAND = 2048


def filled(target: Any, seed: int) -> Any:
    """Fill a square array with small integers, band by band."""
    rng = np.random.default_rng(seed)
    for top in range(0, target.shape[0], BAND):
        rows = min(BAND, target.shape[0] - top)
        target[top : top + rows] = rng.integers(-3, 4, (rows, target.shape[1]), np.int8).astype(target.dtype)
    return target


def equal(one: Any, other: Any) -> bool:
    """Compare two arrays band by band."""
    bands = range(0, one.shape[0], BAND)
    return all(np.array_equal(one[top : top + BAND], other[top : top + BAND]) for top in bands)


@click.command()
@click.option("--size", default=65536)
@click.option("--dtype", default="float64")
@click.option("--devices", multiple=True, default=("0", "0,0", "all"))
@click.option("--backend", default="cuda")
@click.option("--folder", type=Path, default=Path("/tmp/oocgemm-devices"))
@click.option("--in-memory", is_flag=True, help="Multiply NumPy arrays.")
@click.option("--samples", default=3)
@click.option("--chunk", default=2048)
@click.option("--tile")
@click.option("--device-memory")
@click.option("--host-memory")
@click.option("--verify", is_flag=True)
def main(
    size: int,
    dtype: str,
    devices: tuple[str, ...],
    backend: str,
    folder: Path,
    in_memory: bool,
    samples: int,
    chunk: int,
    **options: Any,
) -> None:
    """Compare runs on several lists of devices."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def array(name: str) -> Any:
        if in_memory:
            return np.zeros((size, size), dtype)
        chunks = min(chunk, size), min(chunk, size)
        return zarr.create_array(
            folder / name, shape=(size, size), chunks=chunks, dtype=dtype, compressors=None
        )

    a, b = filled(array("A"), 0), filled(array("B"), 1)
    sources = (a, b) if in_memory else (folder / "A", folder / "B")
    times: defaultdict[str, list[float]] = defaultdict(list)
    reads: dict[str, int] = {}
    reference: Any = None
    for sample in range(samples + 1):
        for given in devices:
            target = np.empty((size, size), dtype) if in_memory else folder / f"C {given}"
            result = oocgemm.gemm(
                *sources, target, devices=given, backend=backend, overwrite=not in_memory, **options
            )
            if sample:
                times[given].append(result.log.wall / 1e9)
                continue
            reference = result.out if reference is None else reference
            same = "equal" if equal(reference, result.out) else "DIFFERENT"
            reads[given] = sum(
                span.bytes for span in result.timeline.spans if span.lane in ("read", "decode")
            )
            plan = result.plan
            print(
                f"devices {given}: tile {plan.tile}, {plan.grid.shape} tiles, host slots A "
                f"{plan.slots.host_a} B {plan.slots.host_b}, predicted {plan.prediction.total:.2f} s, "
                f"bits {same}"
            )
            for number, described in enumerate(result.log.header["devices"]):
                share = report(result.timeline, number).compute_share or 0.0
                print(f"  {described['number']}: {described['device']}, compute share {share:.3f}")
            del result
    first = statistics.median(times[devices[0]])
    print("devices  median s  (least to most)  speed  read GB  relative  TFLOP/s")
    for given in devices:
        median, share = statistics.median(times[given]), reads[given] / max(1, reads[devices[0]])
        print(
            f"{given:8} {median:8.3f}  ({min(times[given]):.3f} to {max(times[given]):.3f}) "
            f"{first / median:6.3f} {reads[given] / 1e9:8.1f} {share:8.3f} {2 * size**3 / median / 1e12:8.2f}"
        )
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
