"""Calls that `bench_grid.py` times: of oocgemm, of CuPy in core, of whole processes, and of another tree."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from grid_cases import COLD, PINNED, ZARR, Case, spread
from grid_data import Files, Operands, evict, is_right, read_array, remove
from grid_loop import multiplier

import oocgemm

SMALL_REPEATS = 10
COMMAND_REPEATS = 3
# What `oocgemm run` imports. pip compiles packages when it installs them, but other tools and a source tree
# may leave that to each process.
IMPORTED = ("oocgemm", "click", "numpy", "ml_dtypes", "cupy", "cupy_backends", "cuda", "nvtx")


class Tree:
    """A process that runs the calls with a source tree. `name` is that of its samples."""

    def __init__(self, name: str, tree: Path, backend: str) -> None:
        self._name = name
        # The script of that tree imports what that tree has.
        script = min(tree.glob("scripts/**/bench_grid.py"), default=Path(__file__).with_name("bench_grid.py"))
        line = [sys.executable, str(script), "--worker", "--backend", backend]
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def sample(self, case: Case, paths: Any, found: dict[str, Any]) -> None:
        """Run one call there; the first one of a case is not counted."""
        assert self._process.stdout is not None
        self._ask({"case": asdict(case), "paths": [str(path) for path in paths or ()]})
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            found.setdefault("contender_errors", {})[self._name] = answer["error"]
        elif self._name not in found["first_of_tree"]:
            found["first_of_tree"][self._name] = answer["seconds"]
        else:
            found["samples"].setdefault(self._name, []).append(answer["seconds"])

    def release(self) -> None:
        """Let it unpin the operands, and free the memory that it keeps between calls."""
        self._ask({})

    def _ask(self, asked: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(backend: str) -> None:
    """Answer the requests of `Tree`: run each call once, and print its seconds.

    The operands of a case stay pinned, and oocgemm keeps its memory, until `Tree.release`.
    """
    operands, held = Operands(), ExitStack()
    arrays: dict[Case, Any] = {}  # of the current case, if it is in memory
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            arrays.clear()
            held.close()
            release()
            continue
        try:
            case = Case(**asked["case"])
            if not asked["paths"] and case not in arrays:
                made = arrays[case] = operands.make(case)
                held.enter_context(pinned(*(made if case.source == PINNED else ())))
            answer: dict[str, Any] = {"seconds": one_call(case, asked["paths"], arrays.get(case), backend)[0]}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


def one_call(case: Case, paths: list[str], arrays: Any, backend: str) -> tuple[float, oocgemm.Result]:
    """Return the seconds and the result of one call of `oocgemm.gemm`, with files or arrays in memory."""
    options: dict[str, Any] = case.options | {"backend": backend}
    a, b, c = arrays or (None, None, None)
    if paths:
        left, right = map(Path, paths)
        own = f"c-of-{os.getpid()}"  # another tree may not read the journal of this one
        place = left.with_name(f"{own}-{case.m}x{case.n}-{case.dtype}-{case.source}{left.suffix}")
        for old in set(left.parent.glob(f"{own}-*")) - {place}:
            remove(old)
        a, b, c = str(left), str(right), str(place)
        options["overwrite"] = True
        prepare(case, (left, right))
    return timed(lambda: oocgemm.gemm(a, b, c, **options))


@contextmanager
def pinned(*arrays: Any) -> Iterator[None]:
    """Pin arrays, as their owner would, for the duration of the block."""
    done = []
    try:
        for x in arrays:
            from cupy.cuda import runtime

            runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
            done.append(x)
        yield
    finally:
        for x in done:
            runtime.hostUnregister(x.ctypes.data)


def prepare(case: Case, paths: Any) -> None:
    if paths and case.source in COLD:
        evict(*paths)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def release() -> None:
    """Free the memory that oocgemm keeps between calls, so that the next contender has it."""
    if hasattr(oocgemm, "release"):
        oocgemm.release()


def free_memory() -> int:
    """Free what CuPy keeps; return the free device memory in bytes. 0 without CuPy."""
    if "cupy" not in sys.modules:
        return 0
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def in_core(case: Case, a: Any, b: Any, c: Any) -> None:
    """Multiply with CuPy: upload, multiply, download into C."""
    import cupy

    if case.source == PINNED:
        left, right = (cupy.empty(x.shape, _raw(x).dtype) for x in (a, b))
        left.set(_raw(a))
        right.set(_raw(b))
    else:
        left, right = cupy.asarray(_raw(a)), cupy.asarray(_raw(b))
    if case.dtype in ("bfloat16", "int8"):  # which CuPy has no cuBLAS product for
        product = cupy.empty(c.shape, _raw(c).dtype)
        multiplier(case.dtype)(left, right, product, False)
    else:
        product = left @ right
    product.get(out=_raw(c))


def _raw(x: Any) -> Any:
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def small_calls(case: Case) -> dict[str, Any]:
    """Time `oocgemm.matmul` and CuPy in core, both with a new C, in turns."""
    import cupy

    a, b, _ = Operands().make(case)
    turns: dict[str, Callable[[], Any]] = {
        "oocgemm": lambda: oocgemm.matmul(a, b, backend="cuda"),
        "in_core": lambda: cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b)),
    }
    found: dict[str, Any] = {"case": asdict(case), "samples": {name: [] for name in turns}, "right": {}}
    for repeat in range(SMALL_REPEATS + 1):
        for name, turn in turns.items():
            seconds, result = timed(turn)
            if repeat:
                found["samples"][name].append(seconds)
            else:
                found["right"][name] = is_right(case, result)
                found[f"first_{name}"] = seconds
            del result
    found["T"] = spread(found["samples"]["oocgemm"])
    release()
    free_memory()
    return found


def _compile() -> None:
    """Compile the packages that a command imports."""
    specs = filter(None, map(importlib.util.find_spec, IMPORTED))
    places = [place for spec in specs for place in spec.submodule_search_locations or ()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j0", *places], check=False)


def commands(folder: Path, backend: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Time whole processes: `oocgemm run` from zarr, `--help` and `--version`."""
    files, operands = Files(folder), Operands()
    program = [sys.executable, "-m", "oocgemm"]
    found: dict[str, Any] = {}
    _compile()

    def process(*arguments: str) -> tuple[float, str]:
        def run() -> str:
            return subprocess.run([*program, *arguments], check=True, capture_output=True, text=True).stdout

        return timed(run)

    for word in ("--help", "--version"):
        found[word] = {"process": [process(word)[0] for _ in range(COMMAND_REPEATS + 1)][1:]}
    for size in sizes:
        case = Case(size, size, size, "float64", ZARR)
        a, b = files.store(case, *operands.make(case)[:2])
        place = files.product(case, "command")
        samples = []
        for _ in range(COMMAND_REPEATS + 1):
            remove(place)
            options = ("--json", "--backend", backend)
            seconds, out = process("run", str(a), str(b), str(place), *options)
            samples.append((seconds, json.loads(out)["report"]["wall"]))
        found[f"run {size}^3"] = {
            "first": samples[0],
            "process": [seconds for seconds, _ in samples[1:]],
            "T": [wall for _, wall in samples[1:]],
            "right": is_right(case, read_array(place)),
        }
    return found
