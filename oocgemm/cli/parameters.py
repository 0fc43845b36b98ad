"""Types of the command line's parameters."""

import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from oocgemm.planning.parts.partition import MAX_WORKERS


class Scalar(click.ParamType[complex]):
    """A real or complex number, such as 2 or 1+2j. The imaginary unit is i or j."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> complex:
        if isinstance(value, int | float | complex):
            return value
        try:
            number = complex(re.sub("i$", "j", str(value).replace(" ", "")))
        except ValueError:
            self.fail(f"{value!r} is not a number: write one such as 2, 0.5 or 1+2j", param, ctx)
        return number.real if number.imag == 0 else number


class Place(click.ParamType[str]):
    """The path or URL of an array, which need not exist. The shell completes it as a file name."""

    name = "path"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class Chunks(click.ParamType[tuple[int, int]]):
    """The extents of a chunk, written ROWSxCOLUMNS."""

    name = "RxC"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
            self.fail(f"{value!r} is not a chunk shape: write ROWSxCOLUMNS, such as 1024x1024", param, ctx)
        return int(parts[0]), int(parts[1])


class Size(click.ParamType[tuple[int, int, int]]):
    """The extents of a product, written MxNxK: an M x K matrix times a K x N matrix."""

    name = "MxNxK"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int, int]:
        parts = str(value).lower().split("x")
        if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
            self.fail(f"{value!r} is not a product: write MxNxK, such as 4096x4096x1024", param, ctx)
        return int(parts[0]), int(parts[1]), int(parts[2])


class Workers(click.ParamType[tuple[int, ...]]):
    """Numbers of workers, written N or FIRST..LAST."""

    name = "N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        first, dots, last = str(value).strip().partition("..")
        ends = (first, last if dots else first)
        if not all(end.isdecimal() and 1 <= int(end) <= MAX_WORKERS for end in ends):
            self.fail(
                f"{value!r} is not a number of workers: write one from 1 to {MAX_WORKERS}, or a range such "
                "as 1..64",
                param,
                ctx,
            )
        if int(ends[0]) > int(ends[1]):
            self.fail(f"{value!r} is an empty range: write the smaller number first", param, ctx)
        return tuple(range(int(ends[0]), int(ends[1]) + 1))
