"""Compile oocgemm's CUDA kernels. The machine code is cached in the user's cache directory.

The caller passes the compiler: the NVRTC of cupy on a machine with a GPU, the NVRTC of a wheel in tests.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from oocgemm.errors import BackendError, InputError
from oocgemm.kernels.sources import kernel_folder, kernel_path
from oocgemm.system import cache

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Compiler(Protocol):
    """An NVRTC library, which compiles CUDA C++ to machine code."""

    def version(self) -> str:
        """Return the version of NVRTC. Cached machine code of another version is not used."""

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the machine code (None if the source does not compile) and the compiler's log."""


def compiled(compiler: Compiler, source: str, arch: str, options: Sequence[str]) -> bytes:
    """Return the machine code of the CUDA source named `source` for an architecture such as "sm_90a".

    If the user's cache has it, it is not compiled again. The cache key is a hash of the compiler's version,
    the options, and the texts of the source and all its includes.

    Raises:
        BackendError: the source does not compile. The message contains the compiler's log.
    """
    options = (f"-arch={arch}", "-std=c++17", "-default-device", *options)
    path = kernel_path(source)
    texts = _with_includes(str(path.relative_to(kernel_folder())))
    parts = compiler.version(), *options, *texts
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    cached = None
    with suppress(InputError):  # without a home directory there is no cache
        cached = cache.folder() / "kernels" / f"{source}-{arch}-{key}.cubin"
    if cached is not None:
        with suppress(OSError):
            return cached.read_bytes()
    code, log = compiler.compile(path.name, texts[0], (*options, f"-I{kernel_folder()}"))
    if code is None:
        raise BackendError(
            f"kernel {source} does not compile for {arch} with {' '.join(options)}:\n{log.strip()}"
        )
    if cached is not None:
        with suppress(OSError):  # if the cache cannot be written, later runs compile again
            cache.write_whole(cached, code)
    return code


def _with_includes(name: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the text of a source, followed by the texts of all files that it includes, directly or not.

    A file that is included twice occurs twice.
    """
    if name in seen:
        return []
    text = (kernel_folder() / name).read_text(encoding="utf-8")
    found = [text]
    for include in _INCLUDE.findall(text):
        found += _with_includes(include, seen | {name})
    return found
