"""Time in-core steps emulated with int8 products, against cuBLAS.

Writes scripts/bench/results/bench_emulated.json.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import cupy

from oocgemm.backends.cuda import calls as cuda_calls
from oocgemm.backends.cuda import multiplier as backend
from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.cuda.multiplier import Emulated, Multiplier, cublas_gemm, device_name
from oocgemm.kernels.spec import Call
from oocgemm.planning import Op
from oocgemm.planning.emulation import MODULI_COUNTS, plane_offsets, work_bytes

SHAPES = ((8192, 8192, 8192), (16384, 16384, 8192), (16384, 16384, 16384))
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Return the time that the device takes for one call of `work`, in seconds."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


class Watched(Kernels):
    """Kernels that record how long the device takes for each launch.

    `macros` is additional macros for the kernel that splits panels into residues.
    """

    def __init__(self, device: int, *macros: str) -> None:
        super().__init__(device)
        self._macros = macros
        self.events: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def plain(self, source: str, entry: str, macros: tuple[str, ...]) -> Callable[..., None]:
        function = super().plain(source, entry, macros + self._macros * (source == "ozaki_split"))

        def watched(*values: Any) -> None:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            function(*values)
            end.record()
            self.events[entry].append((start, end))

        return watched

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all launches since the last call, by the name of the kernel."""
        cupy.cuda.get_current_stream().synchronize()
        found = {
            entry: sum(cupy.cuda.get_elapsed_time(*pair) for pair in pairs) / 1e3
            for entry, pairs in self.events.items()
        }
        self.events.clear()
        return found


def measured(multiplier: Multiplier, dtype: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the median seconds of native and of emulated steps, run alternately, and their ratio.

    `unguarded` is the time of a step whose preparation leaves out the accuracy check. `parts` is the seconds
    of each kernel of one step.
    """
    m, n, k = shape
    most = MODULI_COUNTS[dtype][-1]
    a, b = (cupy.random.standard_normal(s, cupy.float32).astype(dtype) for s in ((m, k), (k, n)))
    a *= 1 + cupy.random.random(a.shape, cupy.float32) / 3  # make all bits of a float64 random
    c = cupy.zeros((m, n), dtype)
    offsets = plane_offsets(most, m, n, k)
    slot, work = cupy.empty(offsets.end, cupy.int8), cupy.empty(work_bytes(most, m, n), cupy.int8)
    emulated = multiplier.emulated(dtype)
    call = Call(dtype, Op.N, Op.N, m, n, k, 1, a.data.ptr, k, b.data.ptr, n, 1, c.data.ptr, n)
    watched = Emulated(watching := Watched(0), multiplier._blas, dtype)
    uncounted = Emulated(Watched(0, "-DOOC_COUNT=0"), multiplier._blas, dtype)
    number = 0

    def prepare(by: Emulated = emulated) -> None:
        nonlocal number
        number = by.prepare(a.data.ptr, b.data.ptr, shape, Op.N, Op.N, slot.data.ptr, offsets)

    def multiply(by: Emulated = emulated) -> None:
        by.multiply(slot.data.ptr, offsets, work.data.ptr, (0, m), shape, number, 1, 1, c.data.ptr, n)

    def unguarded() -> None:
        with patch.object(backend, "suffices", return_value=True):
            prepare(uncounted)

    parts = {
        "unguarded": unguarded,
        "native": lambda: cuda_calls.make(cublas_gemm(multiplier._blas, call)),
        "prepare": prepare,
        "multiply": multiply,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(REPEATS + 1):
        for name, part in parts.items():
            took = seconds(part)
            if repeat:
                times[name].append(took)
        if not number:
            return {"dtype": dtype, "shape": shape, "moduli": 0}
    medians = {name: median(values) for name, values in times.items()}
    ratio = medians["native"] / (medians["prepare"] + medians["multiply"])
    for _ in range(2):
        watching.seconds()
        prepare(watched)
        multiply(watched)
    return {
        **{"dtype": dtype, "shape": shape, "moduli": number, "seconds": medians, "over_native": ratio},
        "parts": watching.seconds(),
    }


def main() -> None:
    multiplier = Multiplier(0)
    rows = []
    with cupy.cuda.Stream(non_blocking=True):
        for dtype in MODULI_COUNTS:
            for shape in SHAPES:
                rows.append(measured(multiplier, dtype, shape))
                cupy.get_default_memory_pool().free_all_blocks()
                print(rows[-1], flush=True)
    multiplier.close()
    text = json.dumps({"device": device_name(0), "repeats": REPEATS, "steps": rows}, indent=1)
    Path(__file__, "../results/bench_emulated.json").resolve().write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
