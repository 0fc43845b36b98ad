"""Find oocgemm's CUDA sources, and compile them. The machine code is cached in the user's cache directory.

The sources are inside the package in a wheel, beside it in a source tree. They are sorted into folders; each
source has a unique name. Includes are relative to the top folder.

    plain/      kernels that show one idea each            emulation/  float64 and float32 from int8 products
    fast/       kernels for speed                          integers/   exact products of int8
    checks/     checksums for the verification             transforms/ transforms of panels on load
    common/     shared headers, and the kernels finish and turn
    decoding/   panels composed of decoded chunks          encoding/   chunks of C compressed
    epilogue/   steps on elements of C, and reductions     selection/  elements of C that are kept
    host/       C for the host (`oocgemm.system.installed`)

The caller passes the compiler: the NVRTC of cupy on a machine with a GPU, the NVRTC of a wheel in tests.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from oocgemm.errors import BackendError, InputError
from oocgemm.system import cache as cached_files


@cache
def kernel_folder() -> Path:
    """Return the top folder of the CUDA sources. Raises `BackendError` if the installation lacks it."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "common" / "scalar.cuh").is_file():
            return folder
    raise BackendError(f"the kernel sources are missing beside {package}: reinstall oocgemm")


def kernel_path(name: str) -> Path:
    """Return the path of the CUDA source `NAME.cu`. Raises `BackendError` if there is none."""
    found = {path.stem: path for path in kernel_folder().glob("*/*.cu")}
    if name not in found:
        raise BackendError(f"there is no kernel {name!r}; there are {', '.join(sorted(found))}")
    return found[name]


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Compiler(Protocol):
    """An NVRTC library, which compiles CUDA C++ to machine code."""

    def version(self) -> str:
        """Return the version of NVRTC. Cached machine code of another version is not used."""

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the machine code (None if the source does not compile) and the compiler's log."""


def compiled(compiler: Compiler, source: str, arch: str, options: Sequence[str]) -> bytes:
    """Return the machine code of the CUDA source named `source` for an architecture such as "sm_90a".

    The code is cached under a hash of the compiler's version, the options, and the texts of the source and of
    all its includes. Raises `BackendError` with the compiler's log if the source does not compile.
    """
    options = (f"-arch={arch}", "-std=c++17", "-default-device", *options)
    path = kernel_path(source)
    texts = _with_includes(str(path.relative_to(kernel_folder())))
    parts = compiler.version(), *options, *texts
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    cached = None
    with suppress(InputError):  # without a home directory there is no cache
        cached = cached_files.folder() / "kernels" / f"{source}-{arch}-{key}.cubin"
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
            cached_files.write_whole(cached, code)
    return code


def _with_includes(name: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the text of a source, and the text of an included file once per include of that file."""
    if name in seen:
        return []
    text = (kernel_folder() / name).read_text(encoding="utf-8")
    found = [text]
    for include in _INCLUDE.findall(text):
        found += _with_includes(include, seen | {name})
    return found
