# ruff: noqa: RUF012, PLR0915, PT018
"""Laboratory for kernels/tensor_wgmma.cu and kernels/tensor_mma.cu: build, check, time. Not part of the package.

lab_wg.py build FOLDER [ARCH...]    compile every configuration with the NVRTC wheel (no GPU), report spills
lab_wg.py run FOLDER OUT SECONDS    on a device: check each configuration in a process of its own, time those that pass
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
Params = dict[str, int]


# --- the entries, as data ------------------------------------------------------------------------------------------------

FORMATS = {
    "tf32": ("float32", 4, 11),
    "f16": ("float16", 2, 6),
    "bf16": ("bfloat16", 2, 9),
}  # dtype, bytes, type of a map


@dataclass(frozen=True)
class Call:
    format: str
    op_a: int
    op_b: int
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    a: int = 0  # addresses
    b: int = 0
    c: int = 0

    @property
    def item(self) -> int:
        return FORMATS[self.format][1]


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


class Wgmma:
    """tensor_wgmma: sm_90a, what the copy engine can take."""

    source = "tensor_wgmma"
    archs = ("sm_90a",)
    instruction = "HGMMA"
    threads = 384

    @staticmethod
    def swaps(call: Call) -> bool:
        return call.format == "tf32" and call.op_b == 0

    @staticmethod
    def tile(params: Params) -> tuple[int, int]:
        """Rows of X and of Y in a block's tile. In C: (x, y), or (y, x) where the call swaps."""
        return 64 * params["M_BLOCKS"] * params["TEAM"], params["MMA_N"]

    @classmethod
    def shared_bytes(cls, params: Params) -> int:
        return params["STAGES"] * (sum(cls.tile(params)) * 128 + 16) + 16 + 1024

    @classmethod
    def misfit(cls, call: Call) -> str:
        """Why the kernel cannot take a call; empty if it can."""
        if call.format == "tf32" and call.op_a != 0 and call.op_b == 0:
            return "tf32 with A transposed and B as stored: neither operand is K-major"
        if not (0 < call.m < 2**31 and 0 < call.n < 2**31 and 0 < call.k < 2**31):
            return "an extent is 0 or does not fit 31 bits"
        if call.a % 16 or call.b % 16 or call.lda * call.item % 16 or call.ldb * call.item % 16:
            return "an operand's address or row is not a multiple of 16 bytes"
        return ""

    @classmethod
    def launch(cls, call: Call, params: Params, processors: int) -> tuple[int, int, int]:
        """Blocks, threads a block, dynamic shared bytes."""
        tile_x, tile_y = cls.tile(params)
        x, y = (call.n, call.m) if cls.swaps(call) else (call.m, call.n)
        cluster = params["CLUSTER"]
        tiles = ceil_div(x, tile_x * cluster) * ceil_div(y, tile_y)
        return min(processors // cluster, tiles) * cluster, cls.threads, cls.shared_bytes(params)

    @classmethod
    def maps(cls, call: Call, params: Params) -> list[dict[str, Any]]:
        """The two tensor maps, of A and of B: type, address, extents and row stride as stored (contiguous first), box."""
        tile_x, tile_y = cls.tile(params)
        tile_y //= params["CLUSTER"]
        rows_a, rows_b = (tile_y, tile_x) if cls.swaps(call) else (tile_x, tile_y)
        depth = 128 // call.item
        made = []
        for address, ld, k_major, mn, rows in (
            (call.a, call.lda, call.op_a == 0, call.m, rows_a),
            (call.b, call.ldb, call.op_b != 0, call.n, rows_b),
        ):
            extents = (call.k, mn) if k_major else (mn, call.k)
            made.append(
                {
                    "type": FORMATS[call.format][2],  # float32 as TFLOAT32: the copy engine rounds
                    "address": address,
                    "extents": extents,
                    "stride": ld * call.item,
                    "box": (depth, rows if k_major else depth),
                }
            )
        return made

    # REDUCE is the k from which the L2 adds: at 512 reading C is faster for 16-bit operands, never for tf32.
    base = {
        "MMA_N": 256,
        "M_BLOCKS": 1,
        "TEAM": 2,
        "STAGES": 4,
        "CLUSTER": 2,
        "GROUP": 8,
        "REDUCE": 1024,
        "PREFETCH": 1,
    }
    formats: tuple[str, ...] = ("f16", "bf16")
    variants: dict[str, Params] = {
        "coop": base,
        "alone": base | {"CLUSTER": 1},
        # Each consumer has tiles of its own: better at small k, worse at 16384.
        "own": base | {"TEAM": 1, "M_BLOCKS": 2, "MMA_N": 128, "STAGES": 7, "REDUCE": 1},
        "wide": base | {"TEAM": 1, "STAGES": 5},
        "small": base | {"MMA_N": 128, "STAGES": 6},
    }


class WgmmaTf32(Wgmma):
    """The same for tf32."""

    formats = ("tf32",)
    base = Wgmma.base | {"CLUSTER": 1, "REDUCE": 1, "GROUP": 4}
    variants = {
        "alone": base,
        "coop": base | {"CLUSTER": 2, "GROUP": 8},
        "small": base | {"MMA_N": 128, "STAGES": 6},
    }


class Mma:
    """tensor_mma: sm_80 and later, any call."""

    source = "tensor_mma"
    archs = ("sm_80", "sm_90a", "sm_100")
    instruction = "HMMA"

    @staticmethod
    def unit(params: Params, item: int) -> int:
        """Elements that addresses and rows of A and B must be multiples of."""
        return max(1, params["COPY"] // item)

    @staticmethod
    def shared_bytes(params: Params) -> int:
        return params["STAGES"] * (params["TILE_M"] + params["TILE_N"]) * 128

    @classmethod
    def misfit(cls, call: Call) -> str:
        return ""  # with the COPY that copy_bytes says

    @staticmethod
    def copy_bytes(call: Call) -> int:
        """The largest COPY that a call's operands allow."""
        together = call.a | call.b | call.lda * call.item | call.ldb * call.item
        return next(size for size in (16, 4, 2) if together % size == 0)

    @classmethod
    def launch(cls, call: Call, params: Params, processors: int) -> tuple[int, int, int]:
        tiles = ceil_div(call.m, params["TILE_M"]) * ceil_div(call.n, params["TILE_N"])
        return tiles, 32 * params["WARPS"], cls.shared_bytes(params)

    @classmethod
    def maps(cls, call: Call, params: Params) -> list[dict[str, Any]]:
        return []

    base = {
        "TILE_M": 128,
        "TILE_N": 128,
        "WARPS": 8,
        "WARPS_M": 2,
        "STAGES": 3,
        "COPY": 16,
        "GROUP": 8,
        "RESIDENT": 1,
    }
    formats: tuple[str, ...] = ("f16", "bf16")
    variants: dict[str, Params] = {
        "pair": base | {"TILE_N": 64, "WARPS": 4, "RESIDENT": 2},
        "std": base,
        # 64 x 64 a warp: faster (0.49 of cuBLAS against 0.42 at 8192), but 24 bytes spill where A is transposed and B is not.
        "four": base | {"WARPS": 4, "RESIDENT": 2},
        "big": base | {"TILE_N": 256},
        "any4": base | {"COPY": 4},
        "any2": base | {"COPY": 2},
    }


class MmaTf32(Mma):
    """The same for tf32."""

    formats = ("tf32",)
    variants = {name: Mma.variants[name] for name in ("std", "pair", "any4")}


KINDS: dict[str, Any] = {"wgmma": Wgmma, "wgmma32": WgmmaTf32, "mma": Mma, "mma32": MmaTf32}
NN, ALL = ((0, 0),), ((0, 0), (0, 1), (1, 0), (1, 1))

# Which variants are built for which formats and operations.
MATRIX: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("wgmma", ("coop", "own"), ("bf16", "f16"), ALL),
    ("wgmma", ("wide",), ("bf16", "f16"), NN),
    ("wgmma", ("alone", "small"), ("bf16",), NN),
    ("wgmma32", ("alone",), ("tf32",), ((0, 0), (0, 1), (1, 1))),
    ("wgmma32", ("coop", "small"), ("tf32",), NN),
    ("mma", ("four", "std"), ("bf16",), NN),
    ("mma", ("big", "pair"), ("bf16",), ALL),
    ("mma", ("pair",), ("f16",), ALL),
    ("mma", ("any2",), ("bf16",), ALL),
    ("mma", ("any2", "any4"), ("f16",), NN),
    ("mma32", ("std", "pair", "any4"), ("tf32",), ALL),
)


@dataclass(frozen=True)
class Config:
    kind: str
    variant: str
    format: str
    op_a: int
    op_b: int
    arch: str = "sm_90a"

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.variant}-{self.format}-{'nt'[self.op_a]}{'nt'[self.op_b]}-{self.arch}"

    @property
    def params(self) -> Params:
        return dict(KINDS[self.kind].variants[self.variant])

    def options(self) -> list[str]:
        macros = {"FORMAT": self.format, "OP_A": self.op_a, "OP_B": self.op_b, **self.params}
        return [f"-DOOC_{name}={value}" for name, value in macros.items()]


def parse(key: str) -> Config:
    kind, variant, form, ops, arch = key.split("-")
    return Config(kind, variant, form, "nt".index(ops[0]), "nt".index(ops[1]), arch)


def configs(archs: tuple[str, ...] = ("sm_90a",)) -> list[Config]:
    return [
        Config(kind, variant, form, *ops, arch)
        for kind, variants, forms, operations in MATRIX
        for variant in variants
        for form in forms
        for ops in operations
        for arch in archs
        if arch in KINDS[kind].archs
    ]


# --- build -------------------------------------------------------------------------------------------------------------

_SITE = (
    Path(sys.prefix)
    / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/nvidia/cu13"
)


def compile_one(config: Config, folder: Path) -> dict[str, Any]:
    """Machine code into the folder. Returns what the compiler said of registers and spills."""
    ctypes.CDLL(str(next((_SITE / "lib").glob("libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(_SITE / "lib/libnvrtc.so.13"))
    source = KINDS[config.kind].source
    program = ctypes.c_void_p()
    text = (KERNELS / f"{source}.cu").read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, f"{source}.cu".encode(), 0, None, None) == 0
    options = [
        f"-arch={config.arch}",
        "-std=c++17",
        f"-I{KERNELS}",
        "-default-device",
        "--ptxas-options=-v",
        *config.options(),
    ]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    )
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode()
    if failed:
        raise SystemExit(f"{config.key} does not compile\n{said}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    path = folder / f"{config.key}.cubin"
    path.write_bytes(code.raw)
    sass = subprocess.run(
        [_SITE / "bin/nvdisasm", "-c", path], capture_output=True, text=True, check=True
    ).stdout
    wanted = KINDS[config.kind].instruction
    figures = {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "highest": 1 + max((int(r) for r in re.findall(r"\bR(\d+)\b", sass)), default=0),
        "stack": sum(int(b) for b in re.findall(r"(\d+) bytes stack frame", said)),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        wanted: len(re.findall(rf"\b{wanted}\b", sass)),
        "remarks": [line for line in said.splitlines() if "erformance" in line or "ignored" in line],
    }
    if figures["stack"] or figures["local"] or not figures[wanted] or figures["remarks"]:
        print("BAD", end=" ")
    return figures


def build(folder: Path, archs: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        made = configs(archs)
        for config, figures in zip(made, pool.map(lambda c: compile_one(c, folder), made), strict=True):
            print(config.key, json.dumps(figures), flush=True)
            (folder / f"{config.key}.json").write_text(json.dumps(figures))


# --- launching ---------------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_longlong) for name in ("m", "n", "k")),
        *((name, ctypes.c_double) for name in ("alpha_re", "alpha_im", "beta_re", "beta_im")),
        *(pair for x in "abc" for pair in ((x, ctypes.c_void_p), (f"ld{x}", ctypes.c_longlong))),
    ]


class Kernel:
    def __init__(self, folder: Path, config: Config) -> None:
        import cupy

        self.config, self.kind, self.params = config, KINDS[config.kind], config.params
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module = cupy.cuda.function.Module()
        self.module.load((folder / f"{config.key}.cubin").read_bytes())
        self.function = ctypes.c_void_p(self.module.get_function(self.kind.source).ptr)
        self.processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        size = self.kind.shared_bytes(self.params)
        self._must(self.driver.cuFuncSetAttribute(self.function, 8, size))  # MAX_DYNAMIC_SHARED_SIZE_BYTES

    def _must(self, code: int) -> None:
        if code:
            raise RuntimeError(f"driver error {code} ({self.config.key})")

    def _map(self, spec: dict[str, Any]) -> Any:
        raw = ctypes.create_string_buffer(256)
        at = (ctypes.addressof(raw) + 127) // 128 * 128
        pair64, pair32 = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
        self._must(
            self.driver.cuTensorMapEncodeTiled(
                ctypes.c_void_p(at), spec["type"], 2, ctypes.c_void_p(spec["address"]), pair64(*spec["extents"]),
                (ctypes.c_uint64 * 1)(spec["stride"]), pair32(*spec["box"]), pair32(1, 1), 0, 3, 3, 0,
            )
        )  # no interleave, 128-byte swizzle, 256 bytes a time into L2, zeros outside  # fmt: skip
        return raw, at

    def prepare(self, call: Call, alpha: float, beta: float) -> Any:
        """A function that launches the call on the current stream."""
        import cupy

        grid, threads, shared = self.kind.launch(call, self.params, self.processors)
        given = Arguments(
            call.m, call.n, call.k, alpha, 0, beta, 0, call.a, call.lda, call.b, call.ldb, call.c, call.ldc
        )
        maps = [self._map(spec) for spec in self.kind.maps(call, self.params)]
        pointers = [*(at for _, at in maps), ctypes.addressof(given)]
        array = (ctypes.c_void_p * len(pointers))(*pointers)

        def launch() -> None:
            assert given.m == call.m and len(maps) < 3  # keeps them alive
            stream = ctypes.c_void_p(cupy.cuda.get_current_stream().ptr)
            self._must(
                self.driver.cuLaunchKernel(
                    self.function, grid, 1, 1, threads, 1, 1, shared, stream, array, None
                )
            )

        return launch


# --- operands ----------------------------------------------------------------------------------------------------------


def to_bf16(x: Any) -> Any:
    import cupy

    bits = x.view(cupy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(cupy.uint16)


def stored(x: Any, form: str, ld: int, shift: int = 0) -> tuple[Any, Any, int]:
    """x (float32, 2-D) in a format with a leading dimension, NaN between rows: buffer, its values in float32, address."""
    import cupy

    rows, columns = x.shape
    item = FORMATS[form][1]
    buffer = cupy.full(
        rows * ld + shift + 64, 0x7FC0 if item == 2 else cupy.nan, cupy.uint16 if item == 2 else cupy.float32
    )
    if form == "f16":
        buffer = buffer.view(cupy.float16)
        buffer[:] = cupy.nan
    view = buffer[shift : shift + rows * ld].reshape(rows, ld)[:, :columns]
    view[:] = to_bf16(x) if form == "bf16" else x
    back = (
        (view.astype(cupy.uint32) << 16).view(cupy.float32) if form == "bf16" else view.astype(cupy.float32)
    )
    return buffer, back, buffer.data.ptr + shift * item


SHAPES = (
    (1, 1, 1), (1, 1, 64), (128, 256, 64), (256, 128, 32), (256, 256, 256), (257, 511, 129), (64, 8, 4096), (1000, 700, 333),
    (1, 3000, 77), (3000, 1, 77), (513, 2047, 1), (4096, 4096, 200), (5000, 3700, 100), (2100, 9000, 513), (300, 300, 8000), (130, 70, 0),
)  # fmt: skip
SCALARS = ((1.0, 0.0), (1.0, 1.0), (2.0, -1.0), (-0.5, 0.25))


def check(folder: Path, key: str) -> None:
    """Every case of one configuration, a line of JSON each."""
    import cupy

    config = parse(key)
    kernel = Kernel(folder, config)
    item = FORMATS[config.format][1]
    unit = kernel.kind.unit(config.params, item) if hasattr(kernel.kind, "unit") else 16 // item
    random = cupy.random.default_rng(hash(key) % 2**32)
    for index, (m, n, k) in enumerate(SHAPES[: int(os.environ.get("LAB_SHAPES", "99"))]):
        for kind, (alpha, beta) in (
            *(("integers", s) for s in SCALARS),
            ("normal", (1.0, 0.0)),
            ("positive", (1.0, 0.0)),
        ):
            if k == 0 and kind != "integers":
                continue
            if kind == "integers":
                a, b = (random.integers(-4, 5, shape).astype(cupy.float32) for shape in ((m, k), (k, n)))
            else:
                a, b = (random.standard_normal(shape, dtype=cupy.float32) for shape in ((m, k), (k, n)))
                if kind == "positive":
                    a, b = abs(a), abs(b)
            old = random.integers(-9, 10, (m, n)).astype(cupy.float32)
            a_stored, b_stored = (a.T if config.op_a else a), (b.T if config.op_b else b)
            lda, ldb = (ceil_div(x.shape[1], unit) * unit + unit * (index % 3) for x in (a_stored, b_stored))
            ldc = ceil_div(n, 4) * 4 + (index % 3 == 1)
            keep_a, a_back, a_at = stored(
                cupy.ascontiguousarray(a_stored), config.format, lda, unit * (index % 2)
            )
            keep_b, b_back, b_at = stored(
                cupy.ascontiguousarray(b_stored), config.format, ldb, unit * (index % 2)
            )
            c = cupy.full(m * ldc + 8, -12345.0, cupy.float32)
            view = c[4 : 4 + m * ldc].reshape(m, ldc)
            view[:, :n] = cupy.nan if beta == 0 else old
            call = Call(
                config.format, config.op_a, config.op_b, m, n, k, lda, ldb, ldc, a_at, b_at, c.data.ptr + 16
            )
            reason = kernel.kind.misfit(call)
            if reason:
                print(json.dumps({"shape": (m, n, k), "skipped": reason}), flush=True)
                continue
            kernel.prepare(call, alpha, beta)()
            cupy.cuda.runtime.deviceSynchronize()
            left, right = (
                (x.T if op else x).astype(cupy.float64)
                for x, op in ((a_back, config.op_a), (b_back, config.op_b))
            )
            want = alpha * (left @ right) + (beta * old if beta else 0)
            got = view[:, :n].astype(cupy.float64)
            outside = bool(
                (c[:4] == -12345).all()
                and (c[4 + m * ldc :] == -12345).all()
                and (view[:, n:] == -12345).all()
            )
            line: dict[str, Any] = {
                "shape": (m, n, k),
                "kind": kind,
                "ld": (lda, ldb, ldc),
                "scalars": (alpha, beta),
            }
            if kind == "integers":
                good = bool((got == want).all())
                if not good:
                    bad = cupy.argwhere(~(got == want))
                    line |= {"wrong": int(bad.shape[0]), "first": bad[0].tolist(), "last": bad[-1].tolist()}
                    line |= {
                        "got": float(got[tuple(bad[0].tolist())]),
                        "want": float(want[tuple(bad[0].tolist())]),
                    }
            else:
                scale = abs(left) @ abs(right)
                error = abs(got - want) / scale
                bound = (4 * k * 2.0**-23) + (2.1 * 2.0**-11 if config.format == "tf32" else 0)
                good = bool((error <= bound).all())
                line |= {
                    "error": float(error.max()),
                    "bias": float(((got - want) / scale).mean()),
                    "bound": bound,
                }
            line["good"] = good and outside
            if not outside:
                line["outside"] = "written"
            print(json.dumps(line), flush=True)
            del keep_a, keep_b
    print(json.dumps({"done": True}), flush=True)


# --- timing ------------------------------------------------------------------------------------------------------------

CUDA_TYPES = {"tf32": 0, "f16": 2, "bf16": 14}


class Cublas:
    def __init__(self) -> None:
        from cupy_backends.cuda.libs import cublas

        self.cublas = cublas
        self.handle = cublas.create()

    def prepare(self, call: Call, alpha: float, beta: float) -> Any:
        import numpy as np

        scalars = np.array([alpha, beta], np.float32)
        kind, compute = CUDA_TYPES[call.format], 77 if call.format == "tf32" else 68

        def launch() -> None:
            self.cublas.gemmEx(
                self.handle, call.op_b, call.op_a, call.n, call.m, call.k, scalars.ctypes.data, call.b, kind, call.ldb,
                call.a, kind, call.lda, scalars.ctypes.data + 4, call.c, 0, call.ldc, compute, -1,
            )  # fmt: skip

        return launch


class Clock:
    """Samples the SM clock and the power beside the runs."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        self.nvml, self.device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.samples: list[tuple[float, int, float]] = []
        self.stop = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.stop.wait(0.02):
            clock = self.nvml.nvmlDeviceGetClockInfo(self.device, 1)
            self.samples.append(
                (time.perf_counter(), clock, self.nvml.nvmlDeviceGetPowerUsage(self.device) / 1000)
            )

    def between(self, start: float, end: float) -> dict[str, float]:
        inside = [s for s in self.samples if start <= s[0] <= end]
        if not inside:
            return {}
        return {"sm_mhz": median(s[1] for s in inside), "watts": median(s[2] for s in inside)}


Problem = tuple[str, int, int, int, int, int, float]  # format, op_a, op_b, m, n, k, beta


def time_all(folder: Path, out: Path, seconds: float, plan: list[tuple[Problem, list[str]]]) -> None:
    import cupy

    began = time.perf_counter()
    cublas, clock, kernels = Cublas(), Clock(), {}
    random = cupy.random.default_rng(7)
    rows: list[dict[str, Any]] = []
    for (form, op_a, op_b, m, n, k, beta), keys in plan:
        if time.perf_counter() - began > seconds:
            rows.append({"left out": (form, op_a, op_b, m, n, k)})
            continue
        shape_a, shape_b = ((k, m) if op_a else (m, k)), ((n, k) if op_b else (k, n))
        operands = []
        for shape in (shape_a, shape_b):
            x = random.standard_normal(shape, dtype=cupy.float32)
            operands.append(to_bf16(x) if form == "bf16" else x.astype(cupy.float16) if form == "f16" else x)
        c = cupy.zeros((m, n), cupy.float32)
        call = Call(
            form,
            op_a,
            op_b,
            m,
            n,
            k,
            shape_a[1],
            shape_b[1],
            n,
            operands[0].data.ptr,
            operands[1].data.ptr,
            c.data.ptr,
        )
        runs = {"cublas": cublas.prepare(call, 1.0, beta)}
        for key in keys:
            if key not in kernels:
                kernels[key] = Kernel(folder, parse(key))
            runs[key] = kernels[key].prepare(call, 1.0, beta)
        times: dict[str, list[float]] = {name: [] for name in runs}
        spans: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        flops = 2 * m * n * k
        repeats = max(2, min(50, int(0.012 / (flops / 5e14))))
        for run in runs.values():
            run()
        cupy.cuda.runtime.deviceSynchronize()
        for turn in range(9):
            names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
            for name in names:
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                began_run = time.perf_counter()
                runs[name]()  # settles caches and clocks, not timed
                start.record()
                for _ in range(repeats):
                    runs[name]()
                end.record()
                end.synchronize()
                times[name].append(cupy.cuda.get_elapsed_time(start, end) / 1000 / repeats)
                spans[name].append(clock.between(began_run, time.perf_counter()))
        for name, taken in times.items():
            seen = [s for s in spans[name] if s]
            row = {
                "format": form, "ops": "nt"[op_a] + "nt"[op_b], "m": m, "n": n, "k": k, "beta": beta, "kernel": name,
                "tflops": flops / median(taken) / 1e12,
                "ratio": median(reference / mine for reference, mine in zip(times["cublas"], taken, strict=True)),
                "spread": (min(taken) / median(taken), max(taken) / median(taken)),
                "sm_mhz": median(s["sm_mhz"] for s in seen) if seen else None,
                "watts": median(s["watts"] for s in seen) if seen else None,
            }  # fmt: skip
            rows.append(row)
            short = name if name == "cublas" else "-".join(name.split("-")[:2])
            print(
                f"{form:5}{row['ops']} {m:6}{n:6}{k:6} b{beta:.0f} {short:18}{row['tflops']:7.1f} {row['ratio']:.3f} {row['sm_mhz']} {row['watts']}",
                flush=True,
            )
        del operands, c, runs, call
        out.write_text(json.dumps({"timings": rows}, indent=1))
    clock.stop.set()


def timing_plan(passed: set[str]) -> list[tuple[Problem, list[str]]]:
    made: list[tuple[Problem, list[str]]] = []

    def add(
        form: str, op_a: int, op_b: int, m: int, n: int, k: int, beta: float, leave_out: tuple[str, ...] = ()
    ) -> None:
        found = [c for c in configs() if (c.format, c.op_a, c.op_b) == (form, op_a, op_b) and c.key in passed]
        made.append(((form, op_a, op_b, m, n, k, beta), [c.key for c in found if c.variant not in leave_out]))

    slow = ("any4", "any2", "std", "four", "big", "pair")
    for form in ("bf16", "tf32", "f16"):
        for size in (8192, 16384, 4096, 2048):
            add(form, 0, 0, size, size, size, 0.0, slow)
        for rank in (512, 1024, 2048):
            add(form, 0, 0, 12288, 12288, rank, 1.0, slow)
        for ops in ((0, 1), (1, 0), (1, 1)):
            add(form, *ops, 8192, 8192, 8192, 0.0, slow)
        add(form, 0, 0, 5000, 7000, 3000, 1.0, slow)
    fast = ("coop", "own", "wide", "alone", "small")
    for form in ("bf16", "tf32", "f16"):
        for ops in ALL:
            add(form, *ops, 8192, 8192, 8192, 0.0, (*fast, "any4", "any2"))
        add(form, 0, 0, 12288, 12288, 1024, 1.0, (*fast, "any4", "any2"))
        add(form, 0, 0, 4096, 4096, 4096, 1.0, (*fast, "std", "big", "pair", "four"))
    return made


def run(folder: Path, out: Path, seconds: float) -> None:
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    keys = [c.key for c in configs()]

    def checked(key: str) -> tuple[str, list[dict[str, Any]], str]:
        try:
            done = subprocess.run(
                [sys.executable, __file__, "check", str(folder), key],
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
            text, error = done.stdout, done.stderr[-600:]
        except subprocess.TimeoutExpired as late:
            text, error = (late.stdout or b"").decode(), "TIMEOUT"
        return key, [json.loads(line) for line in text.splitlines() if line.startswith("{")], error

    passed, report = set(), {}
    with ThreadPoolExecutor(14) as pool:
        for key, lines, error in pool.map(checked, keys):
            bad = [line for line in lines if line.get("good") is False]
            finished = any(line.get("done") for line in lines)
            if finished and not bad:
                passed.add(key)
            errors = [line["error"] for line in lines if "error" in line]
            biases = [
                line["bias"] for line in lines if line.get("kind") == "positive" and line["shape"][2] > 50
            ]
            report[key] = {
                "passed": key in passed, "cases": len(lines) - 1, "worst": max(errors, default=None), "bad": bad[:4],
                "bias": max(biases, key=abs, default=None), "stderr": "" if finished else error, "skipped": sum("skipped" in x for x in lines),
            }  # fmt: skip
            print(
                key,
                "ok" if key in passed else "FAILED",
                {k: v for k, v in report[key].items() if v},
                flush=True,
            )
    print(f"checks took {time.monotonic() - began:.0f} s", flush=True)
    (out / "checks.json").write_text(json.dumps(report, indent=1))
    left = seconds - (time.monotonic() - began)
    arguments = [
        sys.executable,
        __file__,
        "time",
        str(folder),
        str(out / "timings.json"),
        str(left - 15),
        *sorted(passed),
    ]
    if passed and left > 20:
        subprocess.run(arguments, timeout=left, check=False)


def main() -> None:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    match sys.argv[1:]:
        case ["build", folder, *archs]:
            build(Path(folder), tuple(archs) or ("sm_90a",))
        case ["check", folder, key]:
            check(Path(folder), key)
        case ["time", folder, out, seconds, *keys]:
            time_all(Path(folder), Path(out), float(seconds), timing_plan(set(keys)))
        case ["run", folder, out, seconds]:
            run(Path(folder), Path(out), float(seconds))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
