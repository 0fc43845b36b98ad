"""`oocgemm` with changes: ``python -m tests.support.odd_server CHANGES ARGUMENTS``. CHANGES is JSON:

- "clock": the seconds by which the clock is wrong.
- "set": names, such as ``oocgemm.service.http.server:HEAD_SECONDS``, with other values.
- "die": a point of `tests.support.service_server.POINTS`, and a number: the process kills itself when it
  gets to the point for the number-th time.

SIGUSR1 makes the database read-only, and SIGUSR2 makes it writable again.
"""

import json
import signal
import sys
import time
from importlib import import_module
from typing import Any


def main(changes: dict[str, Any]) -> None:
    if "clock" in changes:
        right = time.time
        time.time = lambda: right() + float(changes["clock"])
    for name, value in changes.get("set", {}).items():
        module, _, attribute = name.partition(":")
        setattr(import_module(module), attribute, value)
    if "die" in changes:
        from tests.support.service_server import arm

        arm(*changes["die"])
    from oocgemm.service.job_store import JobStore

    opened: list[JobStore] = []
    right_open = JobStore.__init__

    def recorded(self: JobStore, *arguments: Any, **options: Any) -> None:
        right_open(self, *arguments, **options)
        opened.append(self)

    def switch(signum: int, frame: object) -> None:
        for one in opened:
            one._db.execute(f"PRAGMA query_only = {int(signum == signal.SIGUSR1)}")

    JobStore.__init__ = recorded  # type: ignore[method-assign]
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, switch)
    from oocgemm.__main__ import process

    process()


if __name__ == "__main__":
    first = sys.argv.pop(1)
    main(json.loads(first))
