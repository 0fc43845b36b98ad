"""The lines of a journal: the CRC-32 of a JSON text, and the text, an entry or a list of entries.

Entries that are appended together are one line. A power failure may keep any part of an append, such as its
end without its beginning. That is then one torn line, the last one, and not a line before whole ones, which
means that the journal is damaged.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from oocgemm.planning.tiling import Tile


def done_entries(tiles: Mapping[Tile, str | None]) -> list[dict[str, Any]]:
    """Return the entries for tiles that are durable in C, given the fingerprints of their files."""
    return [{"done": tile} | ({} if files is None else {"files": files}) for tile, files in tiles.items()]


def append_line(file: int, entries: Sequence[dict[str, Any]]) -> None:
    """Append a line with entries to a file, given by its descriptor, and flush the file."""
    rest = memoryview(line_of(entries))
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fdatasync(file)


def line_of(entries: Sequence[dict[str, Any]]) -> bytes:
    """Return the line with these entries of a journal."""
    text = json.dumps(entries[0] if len(entries) == 1 else entries, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_line(line: bytes) -> list[dict[str, Any]] | None:
    """Return the entries in a line; None if it is torn or damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n"):
        return None
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    entries = found if isinstance(found, list) else [found]
    return entries if entries and all(isinstance(entry, dict) for entry in entries) else None
