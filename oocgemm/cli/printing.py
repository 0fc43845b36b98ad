"""Print JSON, errors and warnings in the same way in every command. Define the exit codes."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from oocgemm.errors import BudgetError, DataWarning, InputError
from oocgemm.system.text import plain

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET, EXIT_INTERRUPTED = 1, 2, 3, 130

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def taking(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command. The help text lists them in the given order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def print_json(value: object) -> None:
    """Print a value as JSON with keys in snake_case."""
    click.echo(json.dumps(snake_keys(value), indent=2).replace("\x7f", "\\u007f"))  # the rest is escaped


def snake_keys(value: Any) -> Any:
    """Replace spaces in the keys of plain data. The names of some rates, for example, contain spaces.

    >>> snake_keys({"emulated float64": [{"multiplied by": "blas"}], "A": 1})
    {'emulated_float64': [{'multiplied_by': 'blas'}], 'A': 1}
    """
    if isinstance(value, dict):
        return {_snake(key): snake_keys(one) for key, one in value.items()}
    return [snake_keys(one) for one in value] if isinstance(value, list | tuple) else value


def _snake(key: Any) -> Any:
    return key.replace(" ", "_").lower() if isinstance(key, str) and " " in key else key


def print_note(message: str) -> None:
    """Print a note on stderr."""
    click.echo(f"Note: {plain(message)}", err=True)


def print_warning(message: str) -> None:
    """Print a warning about the data on one line of stderr, even if the message has several lines."""
    click.echo(f"Warning: {plain(message)}", err=True)


def print_error(message: str) -> None:
    """Print an error on one line of stderr, even if the message has several lines."""
    click.echo(f"Error: {plain(message)}", err=True)


def print_interrupted(note: str) -> None:
    """Print that the command was interrupted, and a note, such as how to resume it."""
    click.echo(plain(" ".join(filter(None, ("Interrupted.", note)))), err=True)


def exit_code(error: Exception) -> int:
    """Return the exit code for an error: 2 for wrong input, 3 for too small a budget, 1 for other errors."""
    if isinstance(error, BudgetError):
        return EXIT_BUDGET
    return EXIT_USAGE if isinstance(error, InputError) else EXIT_FAILED


class _Notes(logging.Handler):
    """A logging handler that prints each log record as a note on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print_note(record.getMessage())


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings of this package as notes on stderr, both Python warnings and records of its logger."""
    handler, logger = _Notes(logging.WARNING), logging.getLogger("oocgemm")
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DataWarning):
                print_warning(str(message))
            elif category is UserWarning:
                print_note(str(message))
            else:
                before(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", DataWarning)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


def silence_warnings() -> None:
    """Suppress the notes of this package until the command ends, as --quiet does.

    Warnings about the data stay, since they change what the result means.
    """
    warnings.simplefilter("ignore", UserWarning)
    warnings.simplefilter("default", DataWarning)
    for handler in logging.getLogger("oocgemm").handlers:
        if isinstance(handler, _Notes):
            handler.setLevel(logging.CRITICAL)
