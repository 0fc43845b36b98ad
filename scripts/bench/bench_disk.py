#!/usr/bin/env python
"""Measure products from zarr to zarr on a GPU.

The cases are:

- zarr: 24576^3 float64 in 3 GiB, with the files in the page cache, against in-core cuBLAS.
- beyond: 32768 x 524288 x 32768 float64 in 8 GiB. A and B have 128 GiB each, which is more than GPU, host and
  disk can store. Their chunk files are therefore hard links to a few dozen distinct files, which fit the disk
  and the page cache.
- emulated-float64, emulated-float32: the same shape in 120 GiB with --compute emulated, against native
  in-core cuBLAS.
- cold: an I/O-bound product with an empty page cache, against reading the files of A and B once.
- codecs: zstd and blosc operands, against only decoding them on all cores.
- kernels: a product as in `beyond` with this project's tensor kernel, and with what `--kernel auto` chooses
  after `oocgemm tune`, against the same run with cuBLAS.

Each result is checked against cuBLAS. Runs are repeated. All measured times go to a JSON file with a key per
case.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import cupy
import numpy as np
import zarr
from keeping import here
from linked import CORES, linked_zarr

from oocgemm import stores
from oocgemm.engine.staging import MAX_PIECE_BYTES
from oocgemm.planning.units import format_size


def in_core_seconds(m: int, n: int, k: int, times: int, dtype: str = "float64") -> float:
    """Return the seconds of `times` cuBLAS products (m, n, k) in sequence, with matrices on the device."""
    a, b = cupy.ones((m, k), dtype), cupy.ones((k, n), dtype)
    rng = cupy.random.default_rng(0)
    for x in (a, b):
        for row in range(0, x.shape[0], 2048):
            x[row : row + 2048] = rng.standard_normal(x[row : row + 2048].shape)
    c = cupy.empty((m, n), dtype)
    cupy.matmul(a, b, out=c)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(times):
        cupy.matmul(a, b, out=c)
    end.record()
    end.synchronize()
    seconds = float(cupy.cuda.get_elapsed_time(start, end)) / 1e3
    del a, b, c
    cupy.get_default_memory_pool().free_all_blocks()
    return seconds


def run(a: Path, b: Path, c: Path, *options: str, timeline: Path | None = None) -> dict[str, Any]:
    """Run `oocgemm run` as a process. Return its JSON, with the seconds of the whole process added."""
    shutil.rmtree(c, ignore_errors=True)
    command = [sys.executable, "-m", "oocgemm", "run", str(a), str(b), str(c), "--json", "--backend", "cuda"]
    command += [*options, *(["--timeline", str(timeline)] if timeline else [])]
    started = time.perf_counter()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    process = time.perf_counter() - started
    found: dict[str, Any] = json.loads(out)
    found["process_seconds"] = process
    report = found["report"]
    print(
        f"  T {report['wall']:.3f} s, process {process:.3f} s, compute share {report['compute_share']:.3f}",
        {cause: round(s, 3) for cause, s in report["exposed"].items()},
        {lane: (round(v["busy"], 2), round(v["bytes"] / 1e9, 1)) for lane, v in report["lanes"].items()},
        found["plan"]["tile"], found["plan"]["slots"], found["plan"]["traversal"], flush=True,
    )  # fmt: skip
    return found


def summary(runs: list[dict[str, Any]], what: str, **more: Any) -> dict[str, Any]:
    last = runs[-1]
    found = {
        "what": what,
        "backend": last["backend"],
        "plan": last["plan"],
        "report": last["report"],
        "samples_seconds": [r["report"]["wall"] for r in runs],
        "process_seconds": [r["process_seconds"] for r in runs],
        # The time from the start of the process to the first multiplication, plus the time after the run.
        "start_up_seconds": [
            r["process_seconds"] - r["report"]["wall"] + r["report"]["exposed"].get("start-up", 0.0)
            for r in runs
        ],
        "compute_share": [r["report"]["compute_share"] for r in runs],
        "median_seconds": statistics.median(r["report"]["wall"] for r in runs),
    }
    return here() | found | more


def random_zarr(path: Path, shape: tuple[int, int], chunk: int, seed: int, codec: Any = None) -> None:
    """Create an array of normal random numbers or, with a codec, of random integers, which compress well."""
    array = zarr.create_array(path, shape=shape, dtype="float64", chunks=(chunk, chunk), compressors=codec)
    rng = np.random.default_rng(seed)

    def fill(row: int) -> None:
        block = rng.spawn(1)[0].standard_normal((chunk, shape[1]))
        array[row : row + chunk] = np.round(block * 64) if codec else block

    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(fill, range(0, shape[0], chunk)))


def block_error(a: Path, b: Path, c: Path, chunk: int, at: tuple[int, int]) -> float:
    """Return the largest |dC| / (k eps |A| |B|) of chunk `at` of C, where dC is the difference to cuBLAS."""
    arrays = {path: zarr.open_array(path, mode="r") for path in (a, b)}
    k = arrays[a].shape[1]

    def load(path: Path, i: int, j: int) -> cupy.ndarray:
        return cupy.asarray(arrays[path][i * chunk : (i + 1) * chunk, j * chunk : (j + 1) * chunk], float)

    total, bound = cupy.zeros((chunk, chunk)), cupy.zeros((chunk, chunk))
    for p in range(k // chunk):
        left, right = load(a, at[0], p), load(b, p, at[1])
        total += left @ right
        bound += cupy.abs(left) @ cupy.abs(right)
    (r, s) = (x * chunk for x in at)
    found = cupy.asarray(zarr.open_array(c, mode="r")[r : r + chunk, s : s + chunk], float)
    ratio = cupy.abs(found - total) / (k * np.finfo(arrays[a].dtype).eps * bound)
    return float(cupy.where(cupy.isnan(ratio), cupy.inf, ratio).max())


def chunk_files(*arrays: Path) -> list[Path]:
    return [p for array in arrays for p in array.rglob("*") if p.is_file() and p.name != "zarr.json"]


def evict(files: list[Path]) -> None:
    """Evict files from the page cache."""
    for path in files:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_seconds(files: list[Path], threads: int) -> float:
    """Return the seconds of reading files once with O_DIRECT, in pieces of 16 MiB.

    No run can read them faster.
    """
    import mmap

    def read(path: Path) -> None:
        buffer = mmap.mmap(-1, MAX_PIECE_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while os.readv(descriptor, [buffer]) == MAX_PIECE_BYTES:
            pass
        os.close(descriptor)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - started


def decode_seconds(*arrays: Path, upload: bool = False) -> float:
    """Return the seconds of decoding every chunk of arrays once with oocgemm's stores, on all cores.

    With `upload` each chunk is also copied to the device, which competes with decoding for host memory.
    """
    matrices = [stores.open_matrix("X", str(path)) for path in arrays]
    height, width = matrices[0].layout.read_chunk
    places = [
        (matrix, (r, r + height), (s, s + width))
        for matrix in matrices
        for r in range(0, matrix.shape[0], height)
        for s in range(0, matrix.shape[1], width)
    ]
    # The buffers are larger than the processor's caches, because those of a run are.
    shape = CORES, 8, height, width
    pinned = cupy.cuda.alloc_pinned_memory(8 * math.prod(shape))
    outs = np.frombuffer(pinned, np.float64, math.prod(shape)).reshape(shape)
    outs[...] = 1
    onto = [cupy.empty((height, width)) for _ in range(CORES)]

    def work(number: int) -> None:
        stream, done = cupy.cuda.Stream(non_blocking=True), [cupy.cuda.Event() for _ in range(8)]
        for turn, (matrix, rows, cols) in enumerate(places[number::CORES]):
            out, copied = outs[number, turn % 8], done[turn % 8]
            copied.synchronize()
            matrix.read(rows, cols, out)
            if upload:
                onto[number].data.copy_from_host_async(out.ctypes.data, out.nbytes, stream)
                copied.record(stream)
        stream.synchronize()

    started = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(work, range(CORES)))
    return time.perf_counter() - started


def zarr_case(work: Path, repeats: int, size: int, *options: str) -> dict[str, Any]:
    a, b, c = (work / f"{name}.zarr" for name in "ABC")
    for seed, path in enumerate((a, b)):
        random_zarr(path, (size, size), 2048, seed)
    core, runs = [], []
    for _ in range(repeats):
        core.append(in_core_seconds(size, size, size, 1))
        runs.append(run(a, b, c, "--device-memory", "3GiB", "--host-memory", "8GiB", *options))
    error = max(block_error(a, b, c, 2048, at) for at in ((0, 0), (size // 2048 - 1, 3)))
    return summary(
        runs, f"{size}^3 float64, device memory 3GiB", in_core_seconds=core, worst_error_over_bound=error
    )


def beyond_case(
    work: Path,
    repeats: int,
    size: int,
    *options: str,
    dtype: str = "float64",
    memory: tuple[str, str | None] = ("8GiB", None),
    compute: str = "native",
) -> dict[str, Any]:
    a, b, c = (work / f"{name}.zarr" for name in "ABC")
    k, distinct = 16 * size, 48
    linked_zarr(a, (size, k), 2048, distinct, 1, dtype=dtype)
    linked_zarr(b, (k, size), 2048, distinct, 2, dtype=dtype)
    budgets = ["--device-memory", memory[0], *(["--host-memory", memory[1]] if memory[1] else [])]
    core, runs = [], []
    # This warm-up makes a virtual machine obtain memory and disk blocks, and compiles kernels, so that the
    # timed runs do not.
    run(a, b, c, *budgets, "--compute", compute, *options)
    for repeat in range(repeats):
        core.append(in_core_seconds(size, size, size // 2, 32, dtype))
        print(f"in-core, the same flops: {core[-1]:.3f} s", flush=True)
        timeline = work.parent / f"{work.name}.jsonl" if repeat == repeats - 1 else None
        runs.append(run(a, b, c, *budgets, "--compute", compute, *options, timeline=timeline))
    last = size // 2048 - 1
    error = max(block_error(a, b, c, 2048, at) for at in ((0, 0), (last, last), (last // 2, 1)))
    ratios = [r["report"]["wall"] / x for r, x in zip(runs, core, strict=True)]
    host = memory[1] or f"by default ({format_size(runs[-1]['plan']['footprint']['host']['total'])})"
    what = f"{size} x {k} x {size} {dtype}, {compute}, device memory {memory[0]}, host memory {host}"
    what += f"; chunk files hard-linked to {distinct}; after a run that is not counted"
    return summary(runs, what, in_core_seconds=core, over_in_core=ratios, worst_error_over_bound=error)


def cold_case(work: Path, repeats: int, size: int, *options: str) -> dict[str, Any]:
    a, b, c = (work / f"{name}.zarr" for name in "ABC")
    random_zarr(a, (size // 2, 2 * size), 2048, 1)
    random_zarr(b, (2 * size, 2048), 2048, 2)
    files, alone, runs = chunk_files(a, b), [], []
    size_read = sum(path.stat().st_size for path in files)
    for _ in range(repeats):
        evict(files)
        before = disk_seconds(files, 8)
        runs.append(run(a, b, c, "--device-memory", "8GiB", "--host-memory", "8GiB", *options))
        evict(files)
        # The disk alone is timed before and after the run, and the mean is used, since its speed changes
        # within minutes.
        alone.append((before + disk_seconds(files, 8)) / 2)
        print(f"disk alone {alone[-1]:.3f} s, {size_read / alone[-1] / 1e9:.2f} GB/s", flush=True)
    error = block_error(a, b, c, 2048, (1, 0))
    ratios = [r["report"]["wall"] / x for r, x in zip(runs, alone, strict=True)]
    what = f"{size // 2} x {2 * size} x 2048 float64, page cache empty"
    return summary(runs, what, disk_alone_seconds=alone, over_disk=ratios, worst_error_over_bound=error)


def codecs_case(work: Path, repeats: int, size: int, *options: str) -> dict[str, Any]:
    from zarr.codecs import BloscCodec, ZstdCodec

    found: dict[str, Any] = {}
    for name, codec in (
        ("zstd", ZstdCodec(level=1)),
        ("blosc-lz4", BloscCodec(cname="lz4", clevel=3, shuffle="shuffle")),
    ):
        a, b, c = (work / f"{name}-{operand}.zarr" for operand in "ABC")
        k = 256 * size
        linked_zarr(a, (size, k), 1024, 48, 1, codec)
        linked_zarr(b, (k, size), 1024, 48, 2, codec)
        alone, copied, runs = [], [], []
        for _ in range(repeats):
            alone.append(decode_seconds(a, b))
            copied.append(decode_seconds(a, b, upload=True))
            print(f"{name}: decoding alone {alone[-1]:.3f} s, and copying {copied[-1]:.3f} s", flush=True)
            runs.append(run(a, b, c, "--device-memory", "8GiB", "--host-memory", "8GiB", *options))
        decoded = runs[-1]["report"]["lanes"]["decode"]["bytes"] / (16 * size * k)
        ratios = [decoded * x / r["report"]["wall"] for r, x in zip(runs, alone, strict=True)]
        what = f"{size} x {k} x {size} float64, {name}; chunk files hard-linked to 48"
        error = block_error(a, b, c, 1024, (1, 2))
        found[name] = summary(
            runs,
            what,
            decode_alone_seconds=alone,
            decode_and_copy_seconds=copied,
            of_decode=ratios,
            of_decode_and_copy=[decoded * x / r["report"]["wall"] for r, x in zip(runs, copied, strict=True)],
            decoded_times=decoded,
            worst_error_over_bound=error,
        )
    return found


def kernels_case(work: Path, repeats: int, size: int, *options: str) -> dict[str, Any]:
    a, b, c = (work / f"{name}.zarr" for name in "ABC")
    k, distinct = 16 * size, 48
    linked_zarr(a, (size, k), 2048, distinct, 1)
    linked_zarr(b, (k, size), 2048, distinct, 2)
    subprocess.run([sys.executable, "-m", "oocgemm", "tune", "--dtype", "float64"], check=True)
    runs: dict[str, list[dict[str, Any]]] = {"cublas": [], "tensor": [], "auto": []}
    errors = {}
    for repeat in range(repeats):
        for name, done in runs.items():
            # The first run with `auto` shows which kernel it chooses. That kernel is then timed by its name.
            if name == "auto" and repeat:
                continue
            done.append(
                run(a, b, c, "--device-memory", "8GiB", "--host-memory", "24GiB", "--kernel", name, *options)
            )
            print(f"--kernel {name}: multiplied by {done[-1]['backend']['multiplied_by']}", flush=True)
            errors[name] = block_error(a, b, c, 2048, (size // 2048 - 1, 1))
    cublas = [one["report"]["wall"] for one in runs["cublas"]]
    what = f"{size} x {k} x {size} float64, device memory 8GiB, host memory 24GiB; "
    what += f"chunk files hard-linked to {distinct}"
    found = {name: summary(done, f"{what}; `--kernel {name}`") for name, done in runs.items()}
    for name, one in found.items():
        one["worst_error_over_bound"] = errors[name]
        if name != "cublas":
            one["cublas_seconds"] = cublas
            one["of_cublas"] = [x / s for x, s in zip(cublas, one["samples_seconds"], strict=False)]
    return found


CASES: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "zarr": (zarr_case, 24576),
    "beyond": (beyond_case, 32768),
    **{
        f"emulated-{dtype}": (
            partial(beyond_case, dtype=dtype, memory=("120GiB", "32GiB"), compute="emulated"),
            32768,
        )
        for dtype in ("float64", "float32")
    },
    "cold": (cold_case, 32768),
    "codecs": (codecs_case, 4096),
    "kernels": (kernels_case, 24576),
}


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice(list(CASES)))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("bench-disk"), show_default=True)
@click.option("--tile", help="Tile shape MxNxK, such as 8192x8192x1024.  [default: as planned]")
@click.option("--repeats", default=3, show_default=True)
@click.option("--size", type=int, default=None, help="Size of the product.  [default: that of the case]")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("scripts/bench/results/bench_disk.json"),
    show_default=True,
)
def main(
    cases: tuple[str, ...], folder: Path, repeats: int, size: int | None, tile: str | None, output: Path
) -> None:
    for name in cases or CASES:
        case, usual = CASES[name]
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        print(name, flush=True)
        found = case(folder / name, repeats, size or usual, *(("--tile", tile) if tile else ()))
        shutil.rmtree(folder / name)
        known = json.loads(output.read_text()) if output.exists() else {}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
        keys = (
            "median_seconds",
            "in_core_seconds",
            "over_in_core",
            "over_disk",
            "of_decode",
            "of_decode_and_copy",
            "of_cublas",
            "worst_error_over_bound",
        )
        for part in (found,) if "what" in found else found.values():
            print({key: part[key] for key in keys if key in part}, flush=True)


if __name__ == "__main__":
    main()
