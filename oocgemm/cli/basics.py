"""What the options of all commands are made of. It imports nothing but click."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def taking(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command. The help text lists them in the given order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply
