"""Show what a command does now, and for how long it has run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import perf_counter

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oocgemm.planning.units import format_time
from oocgemm.system.text import plain

SELDOM = 10.0  # seconds between progress lines if stderr is not a terminal


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
