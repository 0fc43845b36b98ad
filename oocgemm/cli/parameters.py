"""Types of the command line's parameters."""

import re
from typing import Any

import click
import numpy as np
from click.shell_completion import CompletionItem

from oocgemm.planning.parts.partition import MAX_WORKERS
from oocgemm.stores.transform import Transform


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


class Changes(click.ParamType[Transform]):
    """The transform of an operand, written NAME=VALUE,NAME=VALUE, with the names of `Transform`."""

    name = "transform"

    def convert(self, value: Any, param: Any, ctx: Any) -> Transform:
        if isinstance(value, Transform):
            return value
        given: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in str(value).split(","))):
            name, equals, text = part.partition("=")
            if name not in Transform.__dataclass_fields__ or bool(equals) == (name == "log1p"):
                self.fail(
                    f"{part!r} is not part of a transform: write missing=CODE, impute=mean|0|FILE|raise, "
                    "log1p, center=k|FILE, scale=k|hwe|FILE or cast=DTYPE, separated by commas",
                    param,
                    ctx,
                )
            if name in given:
                self.fail(f"{name} is given twice: drop one", param, ctx)
            given[name] = self._value(name, text, param, ctx)
        return Transform(**given)

    def _value(self, name: str, text: str, param: Any, ctx: Any) -> Any:
        if name == "log1p":
            return True
        if name == "missing" or (name == "impute" and text not in ("mean", "raise")):
            try:
                return float(text)
            except ValueError:
                if name == "missing" or not text.endswith(".npy"):
                    self.fail(f"{name}={text} is not a number", param, ctx)
        if name == "cast" or text in ("k", "hwe", "mean", "raise"):
            return text
        try:
            return np.load(text, allow_pickle=False)
        except (OSError, ValueError) as error:
            self.fail(f"{name}={text} is neither k nor a readable .npy file ({error})", param, ctx)


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
