"""Show the progress of a run on stderr: a live bar on a terminal, elsewhere a line every ten seconds."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from oocgemm.planning import Plan
from oocgemm.planning.units import format_rate, format_time
from oocgemm.timeline import Span
from oocgemm.timeline.activities import MAX_RECENT, finish_cause, recent_activity

LINKS = ("read", "h2d", "d2h", "write")
# Minimum seconds between two updates of the bar on a terminal, and between two lines printed elsewhere.
REFRESH_SECONDS, LINE_SECONDS = 0.2, 10.0

Show = Callable[[float, str, str], None]


@contextmanager
def progress_display() -> Iterator[Callable[[Plan], Callable[[Span], None]]]:
    """Show the progress of a run, and yield the callback to pass as `gemm`'s argument `progress`.

    The display shows how busy each lane was in the last seconds, and what limited the run then.
    """
    started = perf_counter()
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield partial(_watch, every=LINE_SECONDS, show=partial(_line, console, started))
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        *(TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")),
    )
    task = bar.add_task("", total=1.0)
    doing = Text()

    def show(share: float, tiles: str, rates: str) -> None:
        bar.update(task, completed=share, description=tiles)
        doing.plain = rates

    with Live(Group(bar, doing), console=console, transient=True):
        yield partial(_watch, every=REFRESH_SECONDS, show=show)


def _line(console: Console, started: float, share: float, tiles: str, rates: str) -> None:
    elapsed = format_time(perf_counter() - started)
    console.print(f"{tiles}  {100 * share:.0f}%  {elapsed}  {rates}", soft_wrap=True, markup=False)


def _watch(plan: Plan, *, every: float, show: Show) -> Callable[[Span], None]:
    """Return a callback for finished operations that calls `show` at most once in `every` seconds."""
    backend = "host" if plan.machine.unified else "cuda"
    tiles, before = plan.grid.count, len(plan.done)
    # The bar shows the share of the flops that are done. If k = 0, there are no flops, and the bar shows the
    # share of the bytes of C that are written.
    total = plan.flops or plan.traffic["write"]
    started = shown = perf_counter()
    moved = dict.fromkeys(LINKS, 0)
    flops = 0
    recent: deque[Span] = deque(maxlen=MAX_RECENT)
    finish = finish_cause(selects=not plan.problem.sink.stores_c)

    def step(span: Span) -> None:
        nonlocal shown, flops
        flops += span.flops
        if span.lane in moved:
            moved[span.lane] += span.bytes
        recent.append(span)
        now = perf_counter()
        if now - shown < every:
            return
        shown = now
        seconds = now - started
        # If strips are downloaded in place, into the caller's array, no bytes are written. The downloaded
        # bytes are counted instead.
        written = moved["write"] or moved["d2h"]
        done = before + (tiles - before) * written // max(1, plan.traffic["write"])
        links = "".join(f"  {link} {format_rate(size / seconds)}" for link, size in moved.items() if size)
        share = min(1.0, (flops if plan.flops else written) / max(1, total))
        tiles_done = f"{backend}: tile {min(done + 1, tiles)}/{tiles}"
        rates = f"{format_rate(flops / seconds, 'FLOP')}{links}"
        # The spans of a distributed run stand for whole tiles, and have no length.
        if any(span.end > span.start for span in recent):
            busy, limit = recent_activity(recent, multiplied=flops >= plan.flops, finish=finish)
            rates += "  |  busy " + "  ".join(f"{lane} {100 * share:.0f}%" for lane, share in busy.items())
            rates += f"  |  {limit}" if limit else ""
        with suppress(OSError, ValueError):  # the run must not fail if stderr is closed
            show(share, tiles_done, rates)

    return step
