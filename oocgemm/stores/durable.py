"""What a journal needs of a store: blocks brought to the disk, new content kept apart until it may take the place of
the old, and a way to tell whether files are still those that were there."""

import hashlib
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from oocgemm.planning.tiling import Span
from oocgemm.stores.base import Matrix

# The folder that a run keeps its journal in: in a zarr array's own, where no reader looks; of a file by its name and this.
SIDECAR = ".oocgemm"
# In it, a .npy file that is yet to be given its name.
DATA = "data.npy"
# At most so many chunk files, evenly spread, are looked at to tell whether an array has changed.
MAX_STAMPED = 10_000


class Durable(Matrix, Protocol):
    """A matrix in local files."""

    array: Any

    def redirect(self, folder: Path) -> None:
        """Write to files in `folder` from now on, of the same file system; reads go where they went."""

    def sync_block(self, rows: Span, cols: Span) -> None:
        """Bring a block to the disk, contents and names, as it was written last. Raises `OSError`."""

    def adopt(self, rows: Span, cols: Span) -> None:
        """Bring what was redirected of a block to its place, and to the disk. Doing it again, all or from amid,
        is harmless. Raises `OSError`."""

    def sweep(self) -> None:
        """Take away what a process that was killed has left of files that it was writing."""

    def stamp(self) -> str:
        """Stands for what the files hold, by their sizes and modification times."""

    def block_stamp(self, rows: Span, cols: Span) -> str | None:
        """The same for a block that was synced; None where blocks have no files of their own."""


def sync_files(root: Path, names: Collection[str]) -> None:
    """Bring files below `root` to the disk, and the folders that lead to them. A file that is not there has no content
    to lose: chunks of nothing but the fill value may be left out. Raises `OSError`."""
    for name in names:
        with suppress(FileNotFoundError):
            sync_path(root / name)
    sync_names(root, names)


def sync_names(root: Path, names: Collection[str]) -> None:
    """Bring the folders that lead to files below `root` to the disk: which files there are, not what they hold."""
    folders = {root}
    for parent in {(root / name).parent for name in names}:
        folders |= {folder for folder in (parent, *parent.parents) if root in folder.parents}
    for folder in folders:
        if folder.is_dir():
            sync_path(folder)


def sync_path(path: Path) -> None:
    """Bring one file, or the names in one folder, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stamp(paths: Iterable[str | Path]) -> str:
    """Digest of the sizes and modification times of files, which need not exist."""
    return stamps(paths)["content"]


def stamps(paths: Iterable[str | Path]) -> dict[str, str]:
    """The same as `content`, and as `changes` a digest of the times of inode change (ctime).

    A program can write to a file and restore its modification time, but no program can set its ctime. The ctime also
    changes where the content does not: on chmod, chown, a rename, or a hard link. So a change of it alone is a reason to
    ask, not proof.
    """
    content, changes = hashlib.sha256(), hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:  # whatever keeps it from being looked at will keep it from being read
            content.update(b"-")
            changes.update(b"-")
        else:
            content.update(b"%d %d;" % (status.st_size, status.st_mtime_ns))
            changes.update(b"%d;" % status.st_ctime_ns)
    return {"content": content.hexdigest()[:32], "changes": changes.hexdigest()[:32]}


def spread(down: int, across: int) -> Iterable[tuple[int, int]]:
    """The numbers of all chunks of a grid, or of `MAX_STAMPED` of them."""
    every = -(-down * across // MAX_STAMPED)
    return (divmod(number, across) for number in range(0, down * across, max(1, every)))


def saved_block(folder: Path, rows: Span, cols: Span) -> Path:
    """The file in which a block of a .npy file waits to take its place."""
    return folder / "-".join(map(str, (*rows, *cols)))


def saved_blocks(folder: Path, rows: Span, cols: Span) -> list[tuple[Path, Span, Span]]:
    """Those files that lie within a block."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        parts = path.name.split("-")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            top, bottom, left, right = map(int, parts)
            if rows[0] <= top and bottom <= rows[1] and cols[0] <= left and right <= cols[1]:
                found.append((path, (top, bottom), (left, right)))
    return found
