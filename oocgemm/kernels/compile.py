"""Machine code of our kernels, kept in the user's cache directory between runs.

What compiles is handed in: cupy's NVRTC on a machine with a GPU, that of a wheel in tests.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from oocgemm.errors import BackendError, InputError
from oocgemm.kernels.sources import kernel_folder, kernel_source
from oocgemm.system import cache

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Compiler(Protocol):
    """NVRTC, from wherever it comes."""

    def version(self) -> str:
        """Its version: another may make other code."""

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Machine code, None if it does not compile, and the log."""


def compiled(compiler: Compiler, source: str, arch: str, options: Sequence[str]) -> bytes:
    """Machine code of `kernels/SOURCE.cu` for an architecture such as "sm_90a", from the cache if it is there.

    Raises `BackendError` with the compiler's log, which quotes the line.
    """
    options = (f"-arch={arch}", "-std=c++17", "-default-device", *options)
    text = kernel_source(source)
    parts = compiler.version(), *options, *_with_includes(f"{source}.cu")
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    kept = None
    with suppress(InputError):  # of a user without a home: compiled anew each time
        kept = cache.folder() / "kernels" / f"{source}-{arch}-{key}.cubin"
    if kept is not None:
        with suppress(OSError):
            return kept.read_bytes()
    code, log = compiler.compile(f"{source}.cu", text, (*options, f"-I{kernel_folder()}"))
    if code is None:
        raise BackendError(
            f"kernel {source} does not compile for {arch} with {' '.join(options)}:\n{log.strip()}"
        )
    if kept is not None:
        with suppress(OSError):  # a cache that cannot be written to costs time, nothing else
            cache.write_whole(kept, code)
    return code


def _with_includes(name: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """The texts of a source and of all that it includes, each as often as it is included."""
    if name in seen:
        return []
    text = Path(kernel_folder(), name).read_text(encoding="utf-8")
    found = [text]
    for include in _INCLUDE.findall(text):
        found += _with_includes(include, seen | {name})
    return found
