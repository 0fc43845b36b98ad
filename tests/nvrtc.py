"""NVRTC of the pinned wheel by ctypes, and what its machine code says of itself: no GPU and no toolkit
needed.
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
    ctypes.CDLL(
        str(_wheel("lib", "libnvrtc-builtins.so.13.0"))
    )  # it would look for it on the system's path only
    return ctypes.CDLL(str(_wheel("lib", "libnvrtc.so.13")))


class Nvrtc:
    """The compiler as `oocgemm.kernels.compile` wants it."""

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Machine code, None if it does not compile, and the log."""
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
    """Of one entry: registers a thread, and bytes of stack, of local memory (a thread), of static shared
    memory.
    """

    registers: int
    stack: int
    local: int
    shared: int


def resources(cubin: Path, entry: str) -> Resources:
    """What machine code takes, by cuobjdump."""
    text = _run("cuobjdump", "-res-usage", str(cubin))
    found = re.search(rf"Function {entry}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, shared, local = map(int, found.groups())
    return Resources(registers, stack, local, shared)


def instructions(cubin: Path) -> set[str]:
    """The opcodes that machine code contains, such as FFMA or DMMA, by nvdisasm."""
    text = _run("nvdisasm", "-c", str(cubin))
    return set(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", text, re.MULTILINE))


def _run(tool: str, *arguments: str) -> str:
    path = _wheel("bin", tool)
    path.chmod(path.stat().st_mode | 0o111)
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
