"""Print jobs of a service with rich."""

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from oocgemm.cli.display import console, escape, print_table, table_of
from oocgemm.cli.process import print_note
from oocgemm.cli.queue import ID_LENGTH, SHORT
from oocgemm.planning.units import format_size, format_time
from oocgemm.service.protocol import State

Info = Mapping[str, Any]
# What a job in one of these states waits for.
_UNTIL = {State.HELD: "released", State.PAUSED: "resumed"}


def print_jobs(jobs: Sequence[Info]) -> None:
    """Print a table of jobs, with the last characters of each id that tell it from the others."""
    out = console()
    if not jobs:
        out.print("no jobs")
        return
    length = short_length([job["id"] for job in jobs])
    columns = ("id", "name", "owner", "state", "reason")
    table = table_of(*columns, "priority", "progress", "start")
    for column in table.columns[: len(columns)]:
        column.justify = "left"
    now = time.time()
    for job in jobs:
        progress = ", ".join(filter(None, (progress_of(job), left_of(job, now))))
        cells = [job["id"][-length:], title_of(job), job["owner"], job["state"]]
        cells += [reason_of(job), str(job["priority"]), progress, start_of(job, now)]
        table.add_row(*map(escape, cells))
    print_table(out, table)


def short_length(ids: Sequence[str]) -> int:
    """Return how many of the last characters of ids tell them apart, at least `SHORT`.

    >>> short_length(["X0000001", "Y0000001", "X0000002"])
    8
    """
    return next(
        (size for size in range(SHORT, ID_LENGTH) if len({each[-size:] for each in ids}) == len({*ids})),
        ID_LENGTH,
    )


def title_of(job: Info) -> str:
    """Return the name of a job; its product if it has none, as the page of the service does.

    >>> title_of({"name": "", "a": "data:dir/A.zarr", "b": "data:B.npy", "c": "out:C.zarr"})
    'C.zarr = A.zarr × B.npy'
    """
    a, b, c = (re.split("[:/]", job[operand])[-1] for operand in "abc")
    return str(job["name"]) or f"{c} = {a} × {b}"


def reason_of(job: Info) -> str:
    """Return why a job waits; "" if it does not, or if that is unknown."""
    return f"until {_UNTIL[job['state']]}" if job["state"] in _UNTIL else job["reason"] or ""


def progress_of(job: Info) -> str:
    """Return how many percent of the tiles of a job are done; "" if that is unknown."""
    found = job["progress"]
    return f"{100 * found['done'] // found['total']}%" if found and found["total"] else ""


def start_of(job: Info, now: float) -> str:
    """Return when a job that waits will start, relative to now; "" if that is unknown."""
    if job.get("state") in _UNTIL:
        return f"when {_UNTIL[job['state']]}"
    start = job["predicted_start"]
    if start is None:
        return ""
    return f"in {format_time(start - now)}" if start > now + 1 else "now"


def left_of(job: Info, now: float) -> str:
    """Return how long a running job will still take, from the tiles that are done; "" if it does not run.

    With fewer than two tiles, it is what was predicted, less the time since the start.
    """
    if job["state"] != State.RUNNING or not job["started"] or not job["progress"]:
        return ""
    (done, total), passed = (job["progress"][each] for each in ("done", "total")), now - job["started"]
    seconds = passed / done * (total - done) if done > 1 else max(0.0, job["predicted_s"] - passed)
    return "ends soon" if seconds < 1 else f"{format_time(seconds)} left"


def print_job(job: Info) -> None:
    """Print one job: its product, state, plan, memory and times."""
    out, now = console(), time.time()
    state = job["state"] + (f" ({reason})" if (reason := reason_of(job)) else "")
    plan, progress = job["plan"], job["progress"]
    options = ", ".join(f"{name} {_option(name, value)}" for name, value in job["options"].items())
    rows = [
        *(("job", job["id"]), ("name", title_of(job)), ("owner", job["owner"]), ("state", state)),
        ("error", job["error"]),
        *(("warning", each) for each in job.get("warnings", ())),
        ("product", f"{job['a']} @ {job['b']} -> {job['c']}"),
        ("extents", f"{plan['m']} x {plan['n']} x {plan['k']} {plan['a_dtype']}" if "m" in plan else ""),
        ("options", options),
        ("progress", f"{progress['done']} of {progress['total']} tiles" if progress else ""),
        ("left", left_of(job, now).removesuffix(" left")),
        ("priority", str(job["priority"])),
        ("memory", _needs(job)),
        ("predicted", format_time(job["predicted_s"])),
        ("starts", start_of(job, now)),
        ("device", "" if job["device"] is None else str(job["device"])),
        ("attempts", f"{job['attempt']}, of which {job['failures']} failed (at most {job['max_attempts']})"),
        ("needs", ", ".join(job["needs"])),
        *((name, _local(job[name])) for name in ("created", "started", "ended", "deadline")),
        ("exit code", "" if job["exit_code"] is None else str(job["exit_code"])),
        ("possible", ", ".join(job["actions"])),
    ]
    for name, value in rows:
        if value:
            out.print(f"[bold]{name:<10}[/] {escape(value)}", soft_wrap=True)


def print_planned(planned: Info) -> None:
    """Print what would happen if a job were submitted."""
    plan = planned["plan"]
    out = console()
    if "tile" in plan:
        tiles = " x ".join(map(str, plan["tiles"]))
        out.print(f"[bold]{'tile':<10}[/] {'x'.join(map(str, plan['tile']))}, {tiles} tiles")
    out.print(f"[bold]{'memory':<10}[/] {_needs(planned)}")
    out.print(f"[bold]{'predicted':<10}[/] {format_time(planned['predicted_s'])}")
    if start := start_of(planned, time.time()):
        out.print(f"[bold]{'starts':<10}[/] {start}")
    if plan.get("c_exists"):
        print_note(
            "C is unfinished: the job goes on with it. If A, B or options have changed since, it fails. To "
            "compute all of C anew, pass --overwrite"
        )


def _needs(job: Info) -> str:
    parts = (("device", "device_bytes"), ("host", "host_bytes"), ("disk", "disk_bytes"))
    return ", ".join(f"{name} {format_size(job[key])}" for name, key in parts if job.get(key))


def _option(name: str, value: Any) -> Any:
    return format_size(value) if name.endswith("memory") and isinstance(value, int) else value


def _local(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).isoformat(" ", "seconds")
