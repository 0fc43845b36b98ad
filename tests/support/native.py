"""Build CUDA kernels for the processor with g++, to run them in tests without a GPU."""

import ctypes
import shutil
import subprocess
from functools import cache
from tempfile import TemporaryDirectory

import pytest

from oocgemm.kernels.sources import kernel_folder
from tests.support import SUPPORT


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
