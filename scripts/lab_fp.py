"""A laboratory for kernels/simt.cu and kernels/tensor_f64.cu: compile variants, check them, time them beside cuBLAS.

python scripts/lab_fp.py build FOLDER           with the NVRTC wheel, no GPU
python scripts/lab_fp.py run FOLDER OUT.json    with cupy, on a GPU; --seconds bounds it
"""

import argparse
import ctypes
import glob
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
Params = dict[str, int]
TYPES = {"float32": "float", "float64": "double"}
SIZES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Call:
    """One product: shapes, ops, leading dimensions in elements, what the launch must know."""

    dtype: str
    m: int
    n: int
    k: int
    op_a: int = 0
    op_b: int = 0


@dataclass(frozen=True)
class Kernel:
    name: str
    source: str
    dtypes: tuple[str, ...]
    archs: tuple[str, ...]
    variants: tuple[Params, ...]
    launch: Callable[[Call, Params], tuple[tuple[int, int, int], tuple[int, int, int], int]]
    fits: Callable[[Call, Params], str | None]
    instruction: str | None = None
    maps: None = None


def tiles(call: Call, p: Params) -> int:
    return -(-call.m // p["BLOCK_M"]) * -(-call.n // p["BLOCK_N"])


def grid(call: Call, p: Params) -> tuple[int, int, int]:
    return tiles(call, p), 1, 1


def simt_launch(call: Call, p: Params) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    size = SIZES[call.dtype]
    threads = p["BLOCK_M"] // p["THREAD_M"] * (p["BLOCK_N"] // p["THREAD_N"])
    shared = p["STAGES"] * p["BLOCK_K"] * ((p["BLOCK_M"] + p["BLOCK_N"]) * size + 32)
    return grid(call, p), (threads, 1, 1), shared


def tensor_launch(call: Call, p: Params) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    threads = 32 * p["BLOCK_M"] * p["BLOCK_N"] // (p["WARP_X"] * p["WARP_Y"])
    return grid(call, p), (threads, 1, 1), p["STAGES"] * p["BLOCK_K"] * (p["BLOCK_M"] + p["BLOCK_N"]) * 8


def tile_limit(call: Call, p: Params) -> str | None:
    return None if tiles(call, p) < 2**31 else "more than 2^31 tiles"


def simt(
    block: tuple[int, int, int], thread: tuple[int, int], lanes: int, stages: int, **more: int
) -> Params:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "THREAD_M", "THREAD_N", "LANES_M", "STAGES")
    defaults = {"BAND": 16, "RESIDENT": 1}
    return dict(zip(names, (*block, *thread, lanes, stages), strict=True)) | defaults | more


def tensor(block: tuple[int, int, int], warp: tuple[int, int], mma: int, stages: int, **more: int) -> Params:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "WARP_X", "WARP_Y", "MMA_K", "STAGES")
    return dict(zip(names, (*block, *warp, mma, stages), strict=True)) | {"BAND": 16, "RESIDENT": 1} | more


SIMT_F32 = Kernel(
    "simt",
    "simt",
    ("float32",),
    ("sm_80", "sm_90a", "sm_100"),
    (
        simt((128, 256, 8), (8, 16), 8, 5, ALL_OPS=1),
        simt((128, 128, 8), (8, 16), 8, 5, RESIDENT=2, ALL_OPS=1),
    ),
    simt_launch,
    tile_limit,
    "FFMA",
)
SIMT_F64 = Kernel(
    "simt",
    "simt",
    ("float64",),
    ("sm_80", "sm_90a", "sm_100"),
    (simt((64, 64, 8), (4, 8), 8, 4),),
    simt_launch,
    tile_limit,
    "DFMA",
)
TENSOR_F64 = Kernel(
    "tensor", "tensor_f64", ("float64",), ("sm_90a",),
    (
        tensor((64, 128, 16), (64, 32), 8, 4, RESIDENT=2, ALL_OPS=1),  # overlaps one tile's end with another's sums
        tensor((128, 128, 16), (64, 32), 16, 4, ALL_OPS=1),  # less traffic: the best from k of about 16384 on
        tensor((128, 64, 16), (64, 32), 8, 4, RESIDENT=2, BAND=8),
        tensor((64, 128, 16), (64, 32), 16, 4, RESIDENT=2),
    ),
    tensor_launch, tile_limit, "DMMA",
)  # fmt: skip
# sm_80 and sm_100: not measured. sm_80 has m8n8k4 alone, and less shared memory.
TENSOR_F64_M8N8K4 = Kernel(
    "tensor", "tensor_f64", ("float64",), ("sm_80", "sm_100"),
    (tensor((64, 128, 16), (64, 32), 4, 3, RESIDENT=2), tensor((128, 128, 16), (64, 32), 4, 4)),
    tensor_launch, tile_limit, "DMMA",
)  # fmt: skip
KERNELS_HERE = (SIMT_F32, SIMT_F64, TENSOR_F64)
CHECKED_OPS = ((0, 0), (0, 1), (1, 0), (1, 1))


def label(p: Params) -> str:
    p = {key: value for key, value in p.items() if key != "ALL_OPS"}
    return "_".join(
        f"{''.join(w[0] for w in key.split('_'))}{key.split('_')[-1][:2]}{value}" for key, value in p.items()
    )


def cubin_name(kernel: Kernel, dtype: str, p: Params, ops: tuple[int, int]) -> str:
    compiled = {key: value for key, value in p.items() if key != "ALL_OPS"}
    return f"{kernel.source}-{dtype}-{ops[0]}{ops[1]}-{label(compiled)}.cubin"


# --- building, without a GPU -------------------------------------------------------------------------------------


def nvrtc_library() -> Any:
    folder = next(p for p in sys.path if glob.glob(f"{p}/nvidia/cu13/lib/libnvrtc.so.13"))
    ctypes.CDLL(f"{folder}/nvidia/cu13/lib/libnvrtc-builtins.so.13.0", mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(f"{folder}/nvidia/cu13/lib/libnvrtc.so.13"), Path(folder) / "nvidia/cu13/bin"


def options(dtype: str, p: Params, ops: tuple[int, int], arch: str) -> list[str]:
    macros = {
        "OOC_STORED": TYPES[dtype],
        "OOC_ACCUMULATED": TYPES[dtype],
        "OOC_OP_A": ops[0],
        "OOC_OP_B": ops[1],
    }
    macros |= {key: value for key, value in p.items() if key != "ALL_OPS"}
    return [
        f"-arch={arch}",
        "-std=c++17",
        f"-I{KERNELS}",
        "-default-device",
        *(f"-D{k}={v}" for k, v in macros.items()),
    ]


def compile_cubin(library: Any, source: str, arguments: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (KERNELS / f"{source}.cu").read_bytes()
    library.nvrtcCreateProgram(ctypes.byref(program), text, f"{source}.cu".encode(), 0, None, None)
    array = (ctypes.c_char_p * len(arguments))(*(a.encode() for a in arguments))
    failed = library.nvrtcCompileProgram(program, len(arguments), array)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if failed:
        raise RuntimeError(f"{source} {arguments}: {log.value.decode()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


def build(folder: Path, arch: str) -> None:
    library, tools = nvrtc_library()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {}
    for kernel in KERNELS_HERE:
        for number, p in enumerate(kernel.variants):
            for ops in CHECKED_OPS if number == 0 or p.get("ALL_OPS") else ((0, 0),):
                if not (folder / cubin_name(kernel, kernel.dtypes[0], p, ops)).exists():
                    jobs[cubin_name(kernel, kernel.dtypes[0], p, ops)] = (kernel, p, ops)

    def one(item: tuple[str, tuple[Kernel, Params, tuple[int, int]]]) -> tuple[str, str]:
        name, (kernel, p, ops) = item
        (folder / name).write_bytes(
            compile_cubin(library, kernel.source, options(kernel.dtypes[0], p, ops, arch))
        )
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", folder / name], capture_output=True, text=True, check=True
        )
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout)[0]
        return name, f"{registers} registers, {stack} bytes of stack"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, usage in pool.map(one, jobs.items()):
            print(f"{usage:36} {name}", flush=True)


# --- running, on a GPU -------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_longlong) for name in ("m", "n", "k")),
        *((name, ctypes.c_double) for name in ("alpha_re", "alpha_im", "beta_re", "beta_im")),
        *((name, ctypes.c_longlong) for name in ("a", "lda", "b", "ldb", "c", "ldc")),
    ]


def run(folder: Path, out: Path, seconds: float, shapes: str) -> None:  # noqa: PLR0915
    import cupy
    import numpy as np
    from cupy.cuda import runtime
    from cupy_backends.cuda.libs import cublas

    started = time.monotonic()
    results: dict[str, Any] = {
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "checks": {},
        "times": {},
    }
    cuda = ctypes.CDLL("libcuda.so.1")
    runtime.free(0)  # makes the context
    functions: dict[str, Any] = {}

    def good(status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver answers {status}")

    def save() -> None:
        out.write_text(json.dumps(results, indent=1) + "\n")

    def function(kernel: Kernel, dtype: str, p: Params, ops: tuple[int, int], shared: int) -> Any:
        name = cubin_name(kernel, dtype, p, ops)
        if name not in functions:
            module, entry = ctypes.c_void_p(), ctypes.c_void_p()
            good(cuda.cuModuleLoadData(ctypes.byref(module), (folder / name).read_bytes()))
            good(cuda.cuModuleGetFunction(ctypes.byref(entry), module, kernel.source.encode()))
            good(cuda.cuFuncSetAttribute(entry, 8, shared))  # the most dynamic shared memory
            functions[name] = entry
        return functions[name]

    def launch(
        kernel: Kernel,
        p: Params,
        call: Call,
        alpha: float,
        beta: float,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        c: int,
        ldc: int,
    ) -> None:
        where, block, shared = kernel.launch(call, p)
        arguments = Arguments(call.m, call.n, call.k, alpha, 0, beta, 0, a, lda, b, ldb, c, ldc)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        entry = function(kernel, call.dtype, p, (call.op_a, call.op_b), shared)
        good(cuda.cuLaunchKernel(entry, *where, *block, shared, None, parameters, None))

    host_rng = np.random.default_rng(1)
    rng = cupy.random.default_rng(1)

    def placed(rows: int, columns: int, pad: int, shift: int, dtype: str, integers: bool) -> tuple[Any, Any]:
        """A matrix inside a buffer of NaN, and the whole buffer."""
        buffer = np.full(rows * (columns + pad) + shift + 64, np.nan, dtype)
        inner = buffer[shift : shift + rows * (columns + pad)].reshape(rows, columns + pad)[:, :columns]
        inner[...] = (
            host_rng.integers(-4, 5, (rows, columns))
            if integers
            else host_rng.standard_normal((rows, columns))
        )
        return inner, buffer

    def check(
        kernel: Kernel,
        p: Params,
        ops: tuple[int, int],
        shape: tuple[int, int, int],
        pad: tuple[int, int, int],
        shift: tuple[int, int, int],
        alpha: float,
        beta: float,
        integers: bool,
    ) -> str | None:
        dtype, size = kernel.dtypes[0], SIZES[kernel.dtypes[0]]
        m, n, k = shape
        a, abuf = placed(*((m, k) if ops[0] == 0 else (k, m)), pad[0], shift[0], dtype, integers)
        b, bbuf = placed(*((k, n) if ops[1] == 0 else (n, k)), pad[1], shift[1], dtype, integers)
        c, cbuf = placed(m, n, pad[2], shift[2], dtype, integers)
        at, bt = (a if ops[0] == 0 else a.T).astype("float64"), (b if ops[1] == 0 else b.T).astype("float64")
        old = c.astype("float64") if beta else np.zeros((m, n))
        expected = alpha * (at @ bt) + beta * old
        bound: Any = 0.0
        if not integers:
            bound = (abs(alpha) * (abs(at) @ abs(bt)) + abs(beta * old)) * (
                2 * (k + 4) * float(np.finfo(dtype).eps)
            )
        if not beta:
            c[...] = np.nan
        device = [cupy.asarray(x) for x in (abuf, bbuf, cbuf)]
        ap, bp, cp = (x.data.ptr + s * size for x, s in zip(device, shift, strict=True))
        call = Call(dtype, m, n, k, *ops)
        launch(kernel, p, call, alpha, beta, ap, a.shape[1] + pad[0], bp, b.shape[1] + pad[1], cp, n + pad[2])
        back = device[2].get()
        inner = back[shift[2] : shift[2] + m * (n + pad[2])].reshape(m, n + pad[2])[:, :n]
        wrong = ~(abs(inner.astype("float64") - expected) <= bound)
        if wrong.any():
            where = tuple(int(x[0]) for x in np.nonzero(wrong))
            return f"{int(wrong.sum())} of {m * n} wrong, first at {where}: {float(inner[where])} not {float(expected[where])}"
        inner[...] = np.nan
        return None if np.isnan(back).all() else "wrote outside C"

    # 1. correctness
    checked = KERNELS_HERE if seconds else ()
    small = [
        (1, 1, 1),
        (1, 300, 5),
        (257, 1, 33),
        (3, 5, 0),
        (128, 128, 16),
        (129, 255, 17),
        (64, 64, 1),
        (200, 136, 100),
        (130, 260, 48),
        (513, 770, 129),
        (2, 3, 1000),
        (383, 129, 31),
        (1, 1, 4097),
    ]
    layouts = [((0, 0, 0), (0, 0, 0)), ((4, 8, 4), (0, 0, 0)), ((1, 3, 5), (1, 2, 3)), ((0, 2, 1), (0, 0, 1))]
    scalars = [(1.0, 0.0), (2.0, -3.0)]
    for kernel in checked:
        for number, p in enumerate(kernel.variants):
            failures, done = [], 0
            for ops in CHECKED_OPS:
                if not (folder / cubin_name(kernel, kernel.dtypes[0], p, ops)).exists():
                    continue
                every = (
                    itertools.product(small, layouts, scalars)
                    if number == 0
                    else zip(small, itertools.cycle(layouts), itertools.cycle(scalars), strict=False)
                )
                for shape, (pad, shift), (alpha, beta) in every:
                    try:
                        error = check(kernel, p, ops, shape, pad, shift, alpha, beta, True)
                    except Exception as problem:  # noqa: BLE001
                        error = f"{type(problem).__name__}: {problem}"
                    done += 1
                    if error:
                        failures.append(f"{ops} {shape} {pad} {shift} {alpha} {beta}: {error}")
                    if len(failures) > 5:
                        break
                for shape in ((1500, 1111, 777),):
                    error = check(kernel, p, ops, shape, (0, 0, 0), (0, 0, 0), 1.5, -0.5, False)
                    done += 1
                    if error:
                        failures.append(f"{ops} {shape} normal: {error}")
            results["checks"][f"{kernel.source} {kernel.dtypes[0]} {label(p)}"] = {
                "done": done,
                "failures": failures,
            }
            if failures:
                print("WRONG", kernel.source, p, *failures[:3], sep="\n   ", flush=True)
        print(f"checked {kernel.source} {kernel.dtypes[0]}, {time.monotonic() - started:.0f} s", flush=True)
        save()

    # 2. speed, beside cuBLAS
    samples: list[tuple[float, str]] = []
    watcher = subprocess.Popen(
        ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active", "--format=csv,noheader,nounits", "-lms", "100"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    threading.Thread(
        target=lambda: [samples.append((time.monotonic(), line.strip())) for line in watcher.stdout or ()],
        daemon=True,
    ).start()
    handle = cublas.create()
    types, computes = {"float32": 0, "float64": 1}, {"float32": 68, "float64": 70}

    def cublas_gemm(
        call: Call, alpha: float, beta: float, a: int, lda: int, b: int, ldb: int, c: int, ldc: int
    ) -> None:
        al, be = (np.array(x, call.dtype) for x in (alpha, beta))
        t = types[call.dtype]
        cublas.gemmEx(
            handle,
            min(call.op_b, 1),
            min(call.op_a, 1),
            call.n,
            call.m,
            call.k,
            al.ctypes.data,
            b,
            t,
            ldb,
            a,
            t,
            lda,
            be.ctypes.data,
            c,
            t,
            ldc,
            computes[call.dtype],
            -1,
        )

    def once(action: Callable[[], None]) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        action()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    def compare(
        dtype: str,
        shape: tuple[int, int, int],
        beta: float,
        contestants: list[tuple[str, Kernel, Params]],
        rounds: int,
        ops: tuple[int, int] = (0, 0),
    ) -> None:
        m, n, k = shape
        call = Call(dtype, m, n, k, *ops)
        a = rng.standard_normal(m * k, dtype=dtype)
        b = rng.standard_normal(k * n, dtype=dtype)
        c = rng.standard_normal(m * n, dtype=dtype)
        lda, ldb = (k if ops[0] == 0 else m), (n if ops[1] == 0 else k)
        data = (a.data.ptr, lda, b.data.ptr, ldb, c.data.ptr, n)
        alpha = 1e-3 if beta else 1.0
        actions: dict[str, Callable[[], None]] = {"cublas": lambda: cublas_gemm(call, alpha, beta, *data)}
        for name, kernel, p in contestants:
            actions[name] = lambda kernel=kernel, p=p: launch(kernel, p, call, alpha, beta, *data)  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in actions}
        for action in actions.values():
            action()
        if rounds == 0:
            return
        for turn in range(rounds):
            order = list(actions)
            for name in order if turn % 2 else reversed(order):
                times[name].append(once(actions[name]))
        base = statistics.median(times["cublas"])
        flops = 2.0 * m * n * k
        table = {
            name: {
                "tflops": flops / statistics.median(t) / 1e12,
                "ratio": base / statistics.median(t),
                "spread": (max(t) - min(t)) / statistics.median(t),
            }
            for name, t in times.items()
        }
        key = f"{dtype} {m}x{n}x{k} ops {ops[0]}{ops[1]} beta {beta:g}"
        results["times"][key] = table
        print(key, f"[{time.monotonic() - started:.0f} s]")
        for name, row in sorted(table.items(), key=lambda item: -item[1]["tflops"]):
            print(f"   {row['tflops']:7.2f} TFLOP/s  {row['ratio']:.3f}  {name}", flush=True)
        save()

    def sustained(dtype: str, kernel: Kernel | None, p: Params, length: float = 1.5) -> None:
        n = 8192
        call = Call(dtype, n, n, n)
        a, b, c = (rng.standard_normal(n * n, dtype=dtype) for _ in range(3))
        data = (a.data.ptr, n, b.data.ptr, n, c.data.ptr, n)
        begin, count = time.monotonic(), 0
        spent = 0.0
        while time.monotonic() - begin < length:
            spent += once(
                lambda: (
                    [
                        launch(kernel, p, call, 1, 0, *data) if kernel else cublas_gemm(call, 1, 0, *data)
                        for _ in range(4)
                    ]
                    and None
                )
            )
            count += 4
        seen = [line.split(", ") for at, line in samples if begin + 0.5 < at < time.monotonic()]
        row = {
            "tflops": 2.0 * n**3 * count / spent / 1e12,
            "clock": statistics.mean(float(s[0]) for s in seen) if seen else None,
            "power": statistics.mean(float(s[1]) for s in seen) if seen else None,
            "reasons": sorted({s[3] for s in seen}),
        }
        name = f"{dtype} {label(p) if kernel else 'cublas'}"
        results.setdefault("sustained", {})[name] = row
        print("sustained", name, row, flush=True)
        save()

    def top(
        key: str, contestants: list[tuple[str, Kernel, Params]], count: int
    ) -> list[tuple[str, Kernel, Params]]:
        table = results["times"][key]
        return sorted(contestants, key=lambda c: -table[c[0]]["tflops"])[:count]

    if seconds == 0:  # one launch each, for a profiler
        for kernel in (TENSOR_F64, SIMT_F32):
            compare(
                kernel.dtypes[0],
                (8192, 8192, 8192),
                0.0,
                [(label(kernel.variants[0]), kernel, kernel.variants[0])],
                0,
            )
        watcher.terminate()
        return
    for kernel in (TENSOR_F64, SIMT_F32):
        dtype = kernel.dtypes[0]
        everyone = [(f"{kernel.name} {label(p)}", kernel, p) for p in kernel.variants]
        everyone = [
            c
            for c in everyone
            if not results["checks"][f"{kernel.source} {dtype} {label(c[2])}"]["failures"] or shapes == "all"
        ]
        compare(dtype, (8192, 8192, 8192), 0.0, everyone, 4)
        compare(dtype, (12288, 12288, 1024), 1.0, everyone, 4)
        best = top(f"{dtype} 8192x8192x8192 ops 00 beta 0", everyone, 4)
        best += [c for c in top(f"{dtype} 12288x12288x1024 ops 00 beta 1", everyone, 3) if c not in best]
        sustained(dtype, None, {})
        for _, k, p in best[:2]:
            sustained(dtype, k, p)
        for shape, beta in [
            ((12288, 12288, 512), 1.0),
            ((12288, 12288, 1024), 1.0),
            ((12288, 12288, 2048), 1.0),
            ((4096, 4096, 4096), 0.0),
            ((8192, 8192, 8192), 0.0),
            ((16384, 16384, 16384), 0.0),
        ]:
            if time.monotonic() - started < seconds:
                compare(dtype, shape, beta, best, 5 if shape[2] > 9000 else 11)
        first = [c for c in everyone if c[2].get("ALL_OPS")]
        for ops in CHECKED_OPS[1:]:
            if time.monotonic() - started < seconds:
                compare(dtype, (8192, 8192, 8192), 0.0, first, 7, ops)
        for shape in (
            (8191, 8191, 8191),
            (8190, 8190, 8190),
            (8200, 8200, 8200),
            (1024, 1024, 16384),
            (12288, 1024, 1024),
        ):
            if time.monotonic() - started < seconds:
                compare(dtype, shape, 0.0, best[:2], 5)
    compare(
        "float64", (4096, 4096, 4096), 0.0, [(f"simt {label(p)}", SIMT_F64, p) for p in SIMT_F64.variants], 3
    )
    watcher.terminate()
    results["seconds"] = time.monotonic() - started
    save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--shapes", default="right", help="all: time kernels that are wrong as well")
    given = parser.parse_args()
    if given.mode == "build":
        build(given.folder, given.arch)
    else:
        assert given.out is not None
        run(given.folder, given.out, given.seconds, given.shapes)


if __name__ == "__main__":
    main()
