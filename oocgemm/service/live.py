"""What a running job does now. Its process writes that to a file in its folder, and the server reads it.

The file has one line. It is overwritten in place, by one write, so a reader sees a complete first line.
"""

import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

LIVE = "live.json"
# Seconds between two updates of the file.
SECONDS = 0.5


def observer(plan: Any, path: Path) -> Callable[[Any], None]:
    """Return a callback for finished operations of a plan that keeps a file up to date."""
    from oocgemm.timeline.series import MAX_RECENT, recent_activity

    recent: deque[Any] = deque(maxlen=MAX_RECENT)
    flops, written = 0, monotonic()
    path.write_bytes(b"")  # what an earlier attempt did

    def observe(span: Any) -> None:
        nonlocal flops, written
        recent.append(span)
        flops += span.flops
        if monotonic() - written < SECONDS:
            return
        written = monotonic()
        busy, limit = recent_activity(recent, multiplied=flops >= plan.flops)
        line = json.dumps({"busy": busy, "limit": limit or None}).encode() + b"\n"
        with suppress(OSError), open(path, "r+b", buffering=0) as file:  # a full disk must not fail the job
            file.write(line)

    return observe


def read(path: Path) -> dict[str, Any] | None:
    """Return what the file says: `busy`, the share of time in which each lane was busy, and `limit`."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    except (FileNotFoundError, ValueError):
        return None
    return found
