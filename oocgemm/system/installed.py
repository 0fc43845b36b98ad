"""Find what is installed: the versions of this package and of others, and the compiled host code.

The version is a constant, so that it is known even where the package is not installed. The host code consists
of C functions for work that Python does more slowly, because of the GIL. `scripts/build_host.py` compiles
`kernels/host` to `LIBRARY` when the package is built or installed. Without a library, callers do the same
work in Python. The build imports this module, so it needs no other package.
"""

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY = PACKAGE / "_host.so"


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed, by the names given.

    The versions are read from the names of the folders NAME-VERSION.dist-info. `importlib.metadata` takes ten
    times as long, because it parses a file per package.
    """
    wanted = {_normal(package): package for package in packages}
    found: dict[str, str] = {}
    for _, entry in _installed():
        name, _, version = os.path.splitext(entry)[0].partition("-")
        if version and _normal(name) in wanted:
            found.setdefault(wanted[_normal(name)], version.partition("-")[0])
    return {package: found[package] for package in packages if package in found}


def any_entry_point(group: str) -> bool:
    """Return whether any installed package has entry points of a group. A result of True may be wrong.

    If the answer is no, the caller need not import `importlib.metadata`.
    """
    for folder, entry in _installed():
        with suppress(OSError), open(os.path.join(folder, entry, "entry_points.txt"), "rb") as file:
            if group.encode() in file.read():
                return True
    return False


def _installed() -> Iterator[tuple[str, str]]:
    """Yield the folder and the name of the metadata of every installed package."""
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                if entry.endswith((".dist-info", ".egg-info")):
                    yield folder or ".", entry


def _normal(name: str) -> str:
    """Return a package name in the form that PEP 503 calls normalized."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def compiled() -> ctypes.CDLL | None:
    """Return the library; None if there is none, or if it was compiled from sources of another version."""
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
