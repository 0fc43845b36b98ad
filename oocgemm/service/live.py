"""What a running job does now. Its process writes that to a file in its folder, and the server reads it.

The file is written in place, as all files of a job are (`job`). A reader that meets a part of it, or an empty
file, finds nothing.
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
    from oocgemm.timeline.recent import MAX_RECENT, recent_activity

    recent: deque[Any] = deque(maxlen=MAX_RECENT)
    flops, written = 0, monotonic()
    path.write_bytes(b"")  # without what the attempt before did

    def observe(span: Any) -> None:
        nonlocal flops, written
        recent.append(span)
        flops += span.flops
        if monotonic() - written < SECONDS:
            return
        written = monotonic()
        busy, limit = recent_activity(recent, multiplied=flops >= plan.flops)
        with suppress(OSError):  # the job must not fail if the disk is full
            path.write_text(json.dumps({"busy": busy, "limit": limit or None}))

    return observe


def read(path: Path) -> dict[str, Any] | None:
    """Return what the file says: `busy`, the share of time in which each lane was busy, and `limit`."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found
