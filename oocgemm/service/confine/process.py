"""Restrict a worker or a planner to the roots of the service."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from oocgemm.service.confine.landlock import restrict


def restrict_to(allowed: Mapping[str, Sequence[str]], *own: Path) -> None:
    """Restrict this process to the folders that jobs may use, as an order states them, and to folders `own`.

    Symbolic links from a root to anything else are refused by this package too. Landlock alone would let a
    chunk be a link to a shared library, say, or to a file of another root.

    Raises what `landlock.restrict` raises. NumPy, which starts threads, must not have been imported.
    """
    read, write = ([Path(each) for each in allowed[mode]] for mode in ("read", "write"))
    restrict(read, [*write, *own])
    from oocgemm.stores.files import confine  # this imports NumPy

    confine([*allowed["read"], *allowed["write"]])
