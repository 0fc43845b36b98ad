"""Provide what a journal needs of local files: durable blocks, redo files, and fingerprints.

A run may be killed, or its machine may lose power. It must leave a C that a resumed run completes to the same
bits. The journal (`oocgemm.jobs.journal`) records which tiles are done, and a resumed run does not compute
those again. So one rule carries the argument: a record is written only when the bytes that it vouches for are
durable.

*beta = 0: C is only written.* The run writes a tile's blocks to C, flushes them with `sync_block`, then
records the tile. A crash before the record leaves a tile that is partly written and not recorded. The resumed
run overwrites it. A chunk file is replaced as a whole (`files.publish` writes a temporary file and renames
it), so no reader sees half a chunk. `sync_block` flushes the contents of files and the directory entries that
lead to them. A record therefore implies that every file of the tile has both its content and its name.

*beta != 0: C is also read.* To overwrite a tile in place would destroy the input of a repetition.
`redirect_writes` therefore sends all writes to redo files in another folder, and reads still come from C. The
run flushes a tile's redo files with `sync_block`, then records the tile: this record is the commit. Only then
does `apply_redo` bring the redo files into C. A crash before the commit leaves C unchanged, and the redo
files are discarded. A crash after it leaves some blocks in C and the others in redo files. `apply_redo` is
idempotent. It deletes a redo file only when C has the file's content durably, so a repetition finds all that
is missing. A resumed run calls `apply_redo` for every committed tile before it reads C.

*New results.* A new .npy file is written in the journal's folder, as `DATA`. It is renamed to its path when
it is complete and durable, so a .npy file at that path is always whole. A zarr array carries an attribute
that says that it is incomplete. `set_finished` removes the attribute at the end.

A crash can leave temporary files of interrupted writes. They have random names, so they never collide with a
later write. `delete_partial_files` removes them.

Other programs may change C or an operand between a run and its resumption. Files are therefore fingerprinted
by size and modification time, and the resumed run compares these fingerprints with those in the journal.
"""

import hashlib
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from oocgemm.planning.tiling import Range
from oocgemm.stores.base import Matrix

# Name of the journal's folder inside a zarr array. Beside a .npy file it is appended to the file's name.
SIDECAR = ".oocgemm"
# A new .npy file that is not complete, in the journal's folder.
DATA = "data.npy"
# Maximum number of chunk files in an array's fingerprint. They are evenly spread.
MAX_FINGERPRINTED = 10_000


class Durable(Matrix, Protocol):
    """A matrix in local files, whose blocks can be made durable."""

    array: Any

    def redirect_writes(self, folder: Path) -> None:
        """Send later writes to files in `folder`, on the same file system. Reads are not redirected."""

    def sync_block(self, rows: Range, cols: Range) -> None:
        """Flush the last written content of a block, and the directory entries of its files.

        Raises `OSError`.
        """

    def apply_redo(self, rows: Range, cols: Range) -> None:
        """Move the redirected content of a block to its place and flush it. Idempotent, also after a crash.

        Raises `OSError`.
        """

    def delete_partial_files(self) -> None:
        """Delete the temporary files that a killed process left."""

    def files_fingerprint(self) -> str:
        """Return a fingerprint of the files: a digest of their sizes and modification times."""

    def block_fingerprint(self, rows: Range, cols: Range) -> str | None:
        """Return the fingerprint of a flushed block's files; None if its files also hold other blocks."""


def sync_files(root: Path, names: Collection[str]) -> None:
    """Flush files below `root` and the folders on their paths. Raises `OSError`.

    A missing file is not an error: chunks that hold only the fill value may be left out.
    """
    for name in names:
        with suppress(FileNotFoundError):
            sync_path(root / name)
    sync_names(root, names)


def sync_names(root: Path, names: Collection[str]) -> None:
    """Flush the directory entries of files below `root`, but not their contents. Raises `OSError`."""
    folders = {root}
    for parent in {(root / name).parent for name in names}:
        folders |= {folder for folder in (parent, *parent.parents) if root in folder.parents}
    for folder in folders:
        if folder.is_dir():
            sync_path(folder)


def sync_path(path: Path) -> None:
    """Flush the content of one file, or the entries of one folder. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint_of(paths: Iterable[str | Path]) -> str:
    """Return a digest of the sizes and modification times of files, which need not exist."""
    return fingerprints(paths)["content"]


def fingerprints(paths: Iterable[str | Path]) -> dict[str, str]:
    """Return that digest as `content`, and a digest of the inode change times (ctime) as `changes`.

    A program can write to a file and restore its modification time, but no program can set its ctime. The
    ctime also changes where the content does not: on chmod, chown, a rename, or a hard link. So a change of
    `changes` alone calls for a question to the user. It is no proof.
    """
    content, changes = hashlib.sha256(), hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:  # a file without a status cannot be read either
            content.update(b"-")
            changes.update(b"-")
        else:
            content.update(b"%d %d;" % (status.st_size, status.st_mtime_ns))
            changes.update(b"%d;" % status.st_ctime_ns)
    return {"content": content.hexdigest()[:32], "changes": changes.hexdigest()[:32]}


def spread(down: int, across: int) -> Iterable[tuple[int, int]]:
    """Yield the indices of all chunks of a grid, or of `MAX_FINGERPRINTED` evenly spread ones."""
    every = -(-down * across // MAX_FINGERPRINTED)
    return (divmod(number, across) for number in range(0, down * across, max(1, every)))


def found_locally(path: str) -> bool:
    """Return whether anything is at a local path, or at the path that its `..` and links lead to.

    A folder that is empty, or has only the journal of a run that was killed as it began, does not count.
    """
    try:
        if set(os.listdir(path)) <= {SIDECAR}:
            return False
    except OSError:
        pass
    return os.path.lexists(path) or os.path.lexists(os.path.realpath(path))


def saved_block(folder: Path, rows: Range, cols: Range) -> Path:
    """Return the redo file of a block of a .npy file."""
    return folder / "-".join(map(str, (*rows, *cols)))


def saved_blocks(folder: Path, rows: Range, cols: Range) -> list[tuple[Path, Range, Range]]:
    """Return the redo files whose blocks are inside a block, with their rows and columns."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        parts = path.name.split("-")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            top, bottom, left, right = map(int, parts)
            if rows[0] <= top and bottom <= rows[1] and cols[0] <= left and right <= cols[1]:
                found.append((path, (top, bottom), (left, right)))
    return found
