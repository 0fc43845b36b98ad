"""Types of the command line's parameters."""

import re
from typing import Any

import click
from click.shell_completion import CompletionItem


class Scalar(click.ParamType[complex]):
    """A real or complex number; the imaginary unit is i or j."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> complex:
        if isinstance(value, int | float | complex):
            return value
        try:
            number = complex(re.sub("i$", "j", str(value).replace(" ", "")))
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        return number.real if number.imag == 0 else number


class Place(click.ParamType[str]):
    """The path or URL of an array, completed as a file name. Whether it exists is checked later."""

    name = "path"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class Chunks(click.ParamType[tuple[int, int]]):
    """Extents of a chunk, ROWSxCOLUMNS."""

    name = "RxC"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
            self.fail(f"{value!r} is not a chunk shape: write ROWSxCOLUMNS, such as 1024x1024", param, ctx)
        return int(parts[0]), int(parts[1])


class Size(click.ParamType[tuple[int, int, int]]):
    """Extents of a product, MxNxK."""

    name = "MxNxK"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int, int]:
        parts = str(value).lower().split("x")
        if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
            self.fail(f"{value!r} is not a product: write MxNxK, such as 4096x4096x1024", param, ctx)
        return int(parts[0]), int(parts[1]), int(parts[2])
