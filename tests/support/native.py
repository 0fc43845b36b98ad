"""Build CUDA kernels for the processor with g++, to run them in tests without a GPU."""

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from oocgemm.kernels.compile import kernel_folder, kernel_path
from tests.support import SUPPORT

BUILDS = "OOCGEMM_TEST_BUILDS"  # names the folder of libraries, which all processes of a test run share
Launch = Callable[..., None]  # of the grid, the block and the arguments as ctypes values


@contextmanager
def builds() -> Iterator[None]:
    """Keep libraries in one folder for the block. Processes that it starts share it."""
    if BUILDS in os.environ:
        yield
        return
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(BUILDS, folder)
        yield


@cache
def built(name: str) -> ctypes.CDLL:
    """Compile `tests/support/NAME.cpp`, which includes kernels. Skip the test if there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    return _library("-std=c++17", "-O2", "-U_FORTIFY_SOURCE", str(SUPPORT / f"{name}.cpp"))


def launcher(source: str, entry: str, macros: Sequence[str] = ()) -> Launch:
    """Return a function that runs a kernel on the processor, with a fiber per CUDA thread."""
    return launchers(source, (entry,), tuple(macros))[entry]


@cache
def launchers(source: str, entries: tuple[str, ...], macros: tuple[str, ...]) -> dict[str, Launch]:
    """Compile kernels of a source once for all tests. Return a function that runs it for each."""
    runs = " ".join(f"RUN({entry})" for entry in entries)
    text = kernel_path(source).read_text(encoding="utf-8").replace("extern __shared__", "extern")
    place = Path(os.environ[BUILDS], f"{source}-{sha256(text.encode()).hexdigest()[:8]}.cu")
    if not place.exists():
        (new := place.with_suffix(f".{os.getpid()}")).write_text(text, encoding="utf-8")
        new.replace(place)
    names = f'-DSOURCE="{place}"', f"-DRUNS={runs}", "-x", "c++", str(SUPPORT / "lockstep.hpp")
    loaded = _library("-std=c++20", "-O1", "-U_FORTIFY_SOURCE", *macros, *names)

    def launch(entry: str, grid: Sequence[int], block: Sequence[int], *values: Any) -> None:
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        getattr(loaded, f"run_{entry}")(pointers, (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))

    return {entry: partial(launch, entry) for entry in entries}


def _library(*arguments: str) -> ctypes.CDLL:
    """Compile a library, or load it if another process of this test run has compiled it."""
    library = Path(os.environ[BUILDS], f"{sha256(repr(arguments).encode()).hexdigest()[:16]}.so")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            common = "-w", "-shared", "-fPIC", f"-I{kernel_folder()}", "-o", str(library)
            subprocess.run(["g++", *common, *arguments], check=True)
    return ctypes.CDLL(str(library))
