"""How far a run is and what holds it up, on stderr: a bar on a terminal, elsewhere a line now and then."""

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
from oocgemm.timeline.metrics import shares_between
from oocgemm.timeline.series import utilisation
from oocgemm.timeline.verdict import verdict

LINKS = ("read", "h2d", "d2h", "write")
# Seconds between two updates, on a terminal and elsewhere.
SOON, SELDOM = 0.2, 10.0
# What lanes have been doing is told of this many nanoseconds, and of no more operations than these.
LATELY, LATEST = 5_000_000_000, 1000

Show = Callable[[float, str, str], None]


@contextmanager
def progress_display(enabled: bool) -> Iterator[Callable[[Plan], Callable[[Span], None]] | None]:
    """Yield what `gemm` takes as `progress`, which shows how far the run is.

    It shows the backend, tiles done, the time since this call, flop/s and the rate of each link so far, and of the last
    seconds how busy each lane was and what bounded the run. On a terminal it shows the time left too.
    """
    if not enabled:
        yield None
        return
    started = perf_counter()
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield partial(_watch, every=SELDOM, show=partial(_line, console, started))
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
        yield partial(_watch, every=SOON, show=show)


def _line(console: Console, started: float, share: float, tiles: str, rates: str) -> None:
    elapsed = format_time(perf_counter() - started)
    console.print(f"{tiles}  {100 * share:.0f}%  {elapsed}  {rates}", soft_wrap=True, markup=False)


def _watch(plan: Plan, *, every: float, show: Show) -> Callable[[Span], None]:
    """Return the observer of finished operations. It shows how far the run is `every` so many seconds."""
    backend = "host" if plan.machine.unified else "cuda"
    down, across = plan.grid.shape
    tiles, before = down * across, len(plan.done)
    # Work is counted in flops; where there are none (k = 0), in bytes written.
    total = plan.flops or plan.traffic["write"]
    started = shown = perf_counter()
    moved = dict.fromkeys(LINKS, 0)
    flops = 0
    recent: deque[Span] = deque(maxlen=LATEST)

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
        written = moved["write"] or moved["d2h"]  # by the device, where C lies in memory
        done = before + (tiles - before) * written // max(1, plan.traffic["write"])
        links = "".join(f"  {link} {format_rate(size / seconds)}" for link, size in moved.items() if size)
        share = min(1.0, (flops if plan.flops else written) / max(1, total))
        tiles_done = f"{backend}: tile {min(done + 1, tiles)}/{tiles}"
        rates = f"{format_rate(flops / seconds, 'FLOP')}{links}  |  {_lately(recent, flops >= plan.flops)}"
        with suppress(OSError, ValueError):  # a stream that takes no more is no reason for the run to fail
            show(share, tiles_done, rates)

    return step


def _lately(recent: deque[Span], multiplied: bool) -> str:
    """How busy lanes were lately, and the verdict on these seconds. Until all is `multiplied` it looks no further than
    the last Multiply that has ended: of what came after, the Multiply that is running is not known."""
    # Of what ended before the first that is still known, nothing is.
    known = recent[0].end if len(recent) == LATEST else 0
    until = max(span.end for span in recent)
    since = max(0, until - LATELY, known)
    shares = utilisation([span for span in recent if span.end > since], since, until)
    text = "busy " + "  ".join(f"{lane} {100 * share:.0f}%" for lane, share in shares.items())
    if not multiplied:
        until = max((span.end for span in recent if span.kind == "multiply"), default=0)
    since = max(0, until - LATELY, known)
    if until <= since:
        return text
    found = verdict(shares_between(recent, since, until))
    return f"{text}  |  {'; '.join(filter(None, (found.headline, found.beside)))}"
