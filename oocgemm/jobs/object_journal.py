"""The journal of a run whose C is in an object store.

It has the same lines as a journal in a file (`oocgemm.jobs.journal`), and a line with the epoch of each
process that wrote it. Objects cannot be appended to. Each new line therefore rewrites the journal, by a PUT
on condition that the journal is still the one that this process wrote last. So only the process that wrote
the last epoch can add lines. A line is durable when the PUT returns, and is there as a whole or not at all.

For each tile, the order of writes is the same as with files. Where files are flushed, a PUT has returned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from oocgemm.errors import ExecutionError
from oocgemm.jobs.journal import FORMAT, JOURNAL, read
from oocgemm.jobs.journal_lines import done_entries, line_of
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
        self._append([{"run": {"format": FORMAT} | header}])
        self._append([{"epoch": self._lease.epoch}])

    def resume(self) -> None:
        """Continue the existing journal."""
        self._append([{"epoch": self._lease.epoch}])

    def commit(self, tiles: Sequence[Tile]) -> None:
        """Record that the new content of tiles is durable in redo objects, not yet in C."""
        self._append([{"commit": tile} for tile in tiles])

    def done(self, tiles: Mapping[Tile, str | None]) -> None:
        """Record that the new content of tiles is durable in C, with the fingerprints of their objects."""
        self._append(done_entries(tiles))

    def complete(self, facts: dict[str, Any]) -> None:
        """Record that all of C is durable."""
        self._append([{"complete": facts}])

    def check_in_place(self) -> None:
        """Renew the lease on C. Raises `ExecutionError` if this process may no longer write C."""
        self._lease.confirm()

    def check_lease(self) -> None:
        """Raise `ExecutionError` if it is known that this process may no longer write C."""
        self._lease.check()

    def close(self) -> None:
        """Release the lease."""
        self._lease.release()

    def _append(self, entries: Sequence[dict[str, Any]]) -> None:
        self.check_lease()
        content = self._content + line_of(entries)
        try:
            self._version = self.folder.replace(JOURNAL, content, self._version)
        except ChangedError:
            raise ExecutionError(
                f"another run has taken over C: it has changed the journal {self.folder}/{JOURNAL}; this run "
                "stops"
            ) from None
        self._content = content
