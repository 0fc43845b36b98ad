"""The lines of a journal: the CRC-32 of a JSON object, and the object."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from oocgemm.planning.tiling import Tile


def done_entries(tiles: Mapping[Tile, str | None]) -> list[dict[str, Any]]:
    """Return the entries for tiles that are durable in C, given the fingerprints of their files."""
    return [{"done": tile} | ({} if files is None else {"files": files}) for tile, files in tiles.items()]


def append_lines(file: int, entries: Sequence[dict[str, Any]]) -> None:
    """Append a line for each entry to a file, given by its descriptor, and flush the file."""
    rest = memoryview(b"".join(map(line_of, entries)))
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fdatasync(file)


def line_of(entry: dict[str, Any]) -> bytes:
    """Return an entry of a journal as a line: its CRC-32, and a JSON object."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if its CRC-32 is wrong."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
