"""Call NVRTC of the pinned wheel with ctypes, and inspect the machine code that it produces.

This needs neither a GPU nor a CUDA toolkit.
"""

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


def _wheel(*parts: str) -> Path:
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        path = place.joinpath("cu13", *parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"{'/'.join(parts)} is in none of {places}: scripts/setup test")


@cache
def _library() -> ctypes.CDLL:
    # NVRTC would search this library only on the system's path, so load it first.
    ctypes.CDLL(str(_wheel("lib", "libnvrtc-builtins.so.13.0")))
    return ctypes.CDLL(str(_wheel("lib", "libnvrtc.so.13")))


class Nvrtc:
    """NVRTC with the interface that `oocgemm.kernels.compile` expects of a compiler."""

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Compile a source. Return the machine code, or None if it does not compile, and the log."""
        lib, program = _library(), ctypes.c_void_p()
        text = source.encode()
        assert lib.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None) == 0
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = lib.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        code = None
        if not failed:
            lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
            buffer = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetCUBIN(program, buffer)
            code = buffer.raw
        lib.nvrtcDestroyProgram(ctypes.byref(program))
        return code, log.value.decode()


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses: registers and local memory per thread, stack and shared memory.

    All but registers are in bytes.
    """

    registers: int
    stack: int
    local: int
    shared: int


def resources(cubin: Path, entry: str) -> Resources:
    """Return what a kernel uses, as cuobjdump reports it."""
    text = _run("cuobjdump", "-res-usage", str(cubin))
    found = re.search(rf"Function {entry}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, shared, local = map(int, found.groups())
    return Resources(registers, stack, local, shared)


def instructions(cubin: Path) -> set[str]:
    """Return the opcodes in machine code, such as FFMA or DMMA, as nvdisasm prints them."""
    text = _run("nvdisasm", "-c", str(cubin))
    return set(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", text, re.MULTILINE))


def _run(tool: str, *arguments: str) -> str:
    path = _wheel("bin", tool)
    path.chmod(path.stat().st_mode | 0o111)
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
