"""Define the version of this package, and find the versions of other packages.

The version is a constant, so that it is known even where the package is not installed.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

__version__ = "0.1.0"


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed, by the names given.

    They are read from the names of the folders NAME-VERSION.dist-info. `importlib.metadata` takes ten times
    as long, because it parses a file per package.
    """
    wanted = {_normal(package): package for package in packages}
    found: dict[str, str] = {}
    for _, entry in _installed():
        name, _, version = os.path.splitext(entry)[0].partition("-")
        if version and _normal(name) in wanted:
            found.setdefault(wanted[_normal(name)], version.partition("-")[0])
    return {package: found[package] for package in packages if package in found}


def any_entry_point(group: str) -> bool:
    """Return whether any installed package has entry points of a group; sometimes True if none has.

    Where the answer is no, it saves the import of `importlib.metadata`.
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
