"""Print on a terminal: texts from elsewhere, tables, and what a command does now.

Texts from elsewhere are shown without control characters: see `oocgemm.system.text`.
"""

import io
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import perf_counter

from rich import markup
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table

from oocgemm.planning.units import format_time
from oocgemm.system.text import LINES, plain

SELDOM = 10.0  # seconds between progress lines if stderr is not a terminal


class PlainConsole(Console):
    """A console that prints no control characters but its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(plain(part.text, keep="\n"), part.style)


def escape(text: str) -> str:
    """Return a text on one line, without control characters, in which rich sees no markup."""
    return markup.escape(plain(text))


def print_traceback() -> None:
    """Print the traceback of the present exception on stderr."""
    print(plain(traceback.format_exc(), keep=LINES), end="", file=sys.stderr)


class _Stream(io.TextIOBase):
    """Writes to a stream without control characters."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write a text."""
        self._stream.write(plain(text, keep=LINES))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


class _Formatter(logging.Formatter):
    """Formats a message on one line. The lines of a traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a method of logging
        return plain(super().formatMessage(record))


def use_plain_log() -> None:
    """Let this process, which prints what others send, print no control characters on stderr."""
    handler = logging.StreamHandler(_Stream(sys.stderr))  # type: ignore[arg-type]
    handler.setFormatter(_Formatter())
    handler.setLevel(logging.WARNING)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("asyncio").addHandler(handler)


def table_of(*columns: str) -> Table:
    """Return a table whose first column contains names. Cells that are too wide are folded, never cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def print_table(out: Console, table: Table) -> None:
    """Print a table without breaking a word. If it is too wide for that, print a block of lines per row.

    Only the widest column is wrapped.
    """
    full = full_width(out, table)
    columns = [[column.header, *column.cells] for column in table.columns]
    widths = [max(len(line) for text in texts for line in str(text).split("\n")) for texts in columns]
    widest = max(range(len(widths)), key=widths.__getitem__)
    word = max(len(word) for text in columns[widest] for word in ["", *str(text).split()])
    if full - widths[widest] + word <= out.width:
        for number, column in enumerate(table.columns):
            column.no_wrap = full <= out.width or number != widest
        out.print(table)
        return
    names = [str(column.header).strip() for column in table.columns]
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        out.print(f"[bold]{' '.join(filter(None, (names[0], str(first))))}[/]")
        for name, cell in zip(names[1:], others, strict=True):
            if cell:
                out.print(f"  {name} {cell}")


def full_width(out: Console, table: Table) -> int:
    """Return the width of a table, in columns, if no cell is folded."""
    return Measurement.get(out, out.options.update(max_width=1000), table).maximum


@contextmanager
def doing(enabled: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the present task's name. Show this name and the elapsed time on stderr.

    A terminal shows one line, which is removed at the end. Other outputs get a line every `SELDOM` seconds.
    """
    console = Console(stderr=True, highlight=False)
    if not enabled:
        yield lambda what: None
    elif console.is_terminal:
        columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what: bar.update(task, description=plain(what))
    else:
        with _lines(console) as say:
            yield say


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[str], None]]:
    started, ended, task = perf_counter(), Event(), "starting"

    def say(what: str) -> None:
        nonlocal task
        task = plain(what)

    def repeat() -> None:  # a thread, so that lines appear even if `say` is not called for minutes
        while not ended.wait(SELDOM):
            console.print(f"{format_time(perf_counter() - started)}  {task}", soft_wrap=True, markup=False)

    thread = Thread(target=repeat, name="oocgemm-progress", daemon=True)
    try:
        with suppress(RuntimeError):  # no thread can be started: print no lines, but continue the work
            thread.start()
        yield say
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
