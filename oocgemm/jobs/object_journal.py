"""The journal of a run whose C is in an object store.

It has the same lines as a journal in a file (`oocgemm.jobs.journal`), and a line with the epoch of each
process that wrote it. Objects cannot be appended to. Each new line therefore rewrites the journal, by a PUT
on condition that the journal is still the one that this process wrote last. So only the process that wrote
the last epoch can add lines. A line is durable when the PUT returns, and is there as a whole or not at all.

For each tile, the order of writes is the same as with files. Where files are flushed, a PUT has returned.
"""

import json
import zlib
from typing import Any

from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import FORMAT, JOURNAL, read
from oocgemm.jobs.lease import Lease
from oocgemm.planning.tiling import Tile
from oocgemm.stores.base import ChangedError, RemoteFolder


class ObjectJournal:
    """The journal in a folder of an object store, open for writing. This process holds the lease on C.

    Raises `InputError` if another run holds the lease.
    """

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self._lease = Lease(folder)
        try:
            found = folder.get(JOURNAL)
            self._content: bytes = b"" if found is None else found[0]
            self._version: dict[str, str] | None = None if found is None else found[1]
            self.record = read(folder)
        except BaseException:
            self.close()
            raise

    def start(self, header: dict[str, Any]) -> None:
        """Replace any old journal by a new one that has only a header."""
        self._content = b""
        self._append({"run": {"format": FORMAT} | header})
        self._append({"epoch": self._lease.epoch})

    def resume(self) -> None:
        """Continue the existing journal."""
        self._append({"epoch": self._lease.epoch})

    def commit(self, tile: Tile) -> None:
        """Record that a tile's new content is durable in redo objects, not yet in C."""
        self._append({"commit": tile})

    def done(self, tile: Tile, files: str | None) -> None:
        """Record that a tile's new content is durable in C, with the fingerprint of the tile's objects."""
        self._append({"done": tile} | ({} if files is None else {"files": files}))

    def complete(self, facts: dict[str, Any]) -> None:
        """Record that all of C is durable."""
        self._append({"complete": facts})

    def check_in_place(self) -> None:
        """Renew the lease on C. Raises `ExecutionError` if this process may no longer write C."""
        self._lease.confirm()

    def check_lease(self) -> None:
        """Raise `ExecutionError` if it is known that this process may no longer write C."""
        self._lease.check()

    def close(self) -> None:
        """Release the lease."""
        self._lease.release()

    def _append(self, entry: dict[str, Any]) -> None:
        self.check_lease()
        text = json.dumps(entry, separators=(",", ":")).encode()
        content = self._content + b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            self._version = self.folder.replace(JOURNAL, content, self._version)
        except ChangedError:
            raise ExecutionError(
                f"another run has taken over C: it has changed the journal {self.folder}/{JOURNAL}; this run "
                "stops"
            ) from None
        self._content = content
