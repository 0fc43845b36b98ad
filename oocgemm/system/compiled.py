"""Loads the compiled host code: C functions for work that Python does more slowly, because of the GIL.

`scripts/build_host.py` compiles `kernels/host` to `LIBRARY` when the package is built or installed. Without a
library, callers do the same work in Python.
"""

import ctypes
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY = PACKAGE / "_host.so"


@cache
def compiled() -> ctypes.CDLL | None:
    """Return the library; None if there is none, or if it was compiled from other sources than those here."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "ooc_sources")))
    except (OSError, ValueError):
        return None
    return library if version.decode() == sources_version() else None


def sources_version() -> str:
    """Return a hash of the sources: beside the package in a source tree, inside it in a wheel."""
    folders = PACKAGE / "_kernels" / "host", PACKAGE.parent / "kernels" / "host"
    sources = [path.read_bytes() for folder in folders for path in sorted(folder.glob("*.[ch]"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]
