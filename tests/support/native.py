"""Build CUDA kernels for the processor with g++, to run them in tests without a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from oocgemm.kernels.sources import kernel_folder, kernel_path
from tests.support import SUPPORT

Launch = Callable[..., None]  # of the grid, the block and the arguments as ctypes values


@cache
def built(name: str) -> ctypes.CDLL:
    """Compile `tests/support/NAME.cpp`, which includes kernels. Skip the test if there is no g++."""
    flags = "-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", f"-I{kernel_folder()}"
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    with TemporaryDirectory() as folder:
        library = f"{folder}/{name}.so"
        subprocess.run(["g++", *flags, SUPPORT / f"{name}.cpp", "-o", library], check=True)
        return ctypes.CDLL(library)


def launcher(source: str, entry: str, macros: Sequence[str] = ()) -> Launch:
    """Return a function that runs a kernel on the processor, with a thread of the system per CUDA thread."""
    return launchers(source, (entry,), tuple(macros))[entry]


@cache
def launchers(source: str, entries: tuple[str, ...], macros: tuple[str, ...]) -> dict[str, Launch]:
    """Compile kernels of a source once for all tests. Return a function that runs it for each."""
    flags = "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{kernel_folder()}"
    runs = " ".join(f"RUN({entry})" for entry in entries)
    with TemporaryDirectory() as folder:
        place, library = Path(folder, f"{source}.cu"), f"{folder}/{source}.so"
        text = kernel_path(source).read_text(encoding="utf-8")
        place.write_text(text.replace("extern __shared__", "extern"), encoding="utf-8")
        names = f'-DSOURCE="{place}"', f"-DRUNS={runs}", "-x", "c++", SUPPORT / "lockstep.hpp"
        subprocess.run(["g++", *flags, *macros, *names, "-o", library], check=True)
        loaded = ctypes.CDLL(library)

    def launch(entry: str, grid: Sequence[int], block: Sequence[int], *values: Any) -> None:
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        getattr(loaded, f"run_{entry}")(pointers, (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))

    return {entry: partial(launch, entry) for entry in entries}
