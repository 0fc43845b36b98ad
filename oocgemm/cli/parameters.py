"""Parameters of commands: the options of the verbs (`oocgemm.jobs.options`), and types of values."""

import os
import re
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, cast

import click
import numpy as np
from click.shell_completion import CompletionItem

from oocgemm.cli.process import JSON, F, taking
from oocgemm.jobs.option_groups import LazyArray, Option
from oocgemm.jobs.options import options_of, rendered, types_of
from oocgemm.planning.partition import MAX_WORKERS
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
                    f"{part!r} is not part of a transform: write missing=CODE, "
                    "impute=mean|NUMBER|FILE|raise, target_sum=NUMBER, log1p, center=k|FILE, "
                    "scale=k|hwe|FILE, clip=LOW:HIGH or cast=DTYPE, separated by commas",
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
        if name == "clip":
            return tuple(text.split(":"))
        if name in ("missing", "target_sum") or (name == "impute" and text not in ("mean", "raise")):
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


class Extents(click.ParamType[tuple[int, ...]]):
    """Extents, written as `name` shows. Error messages name `what` they are, the `form` and an example."""

    def __init__(self, name: str, what: str, form: str, example: str) -> None:
        self.name, self._what, self._form, self._example = name, what, form, example

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if len(parts) != self.name.count("x") + 1 or not all(p.isdecimal() and int(p) for p in parts):
            message = f"{value!r} is not {self._what}: write {self._form}, such as {self._example}"
            self.fail(message, param, ctx)
        return tuple(map(int, parts))


# The extents of a chunk, and of a product of an M x K matrix and a K x N matrix.
CHUNKS = Extents("RxC", "a chunk shape", "ROWSxCOLUMNS", "1024x1024")
PRODUCT = Extents("MxNxK", "a product", "MxNxK", "4096x4096x1024")


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


QUIET = click.option("--quiet", is_flag=True, help="Print only errors and warnings about the data.")


def verb_options(verb: str | type) -> Callable[[F], F]:
    """Return a decorator that adds the options of a verb, or of a class of options, to a command."""
    return taking(*(option(verb, name) for name, found in options_of(verb).items() if found.cli))


def verb_command(verb: str, *operands: str, **more: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a command with operands, and with the options of a verb."""
    arguments = [click.argument(name, type=Place()) for name in operands]

    def make(function: Callable[..., Any]) -> click.Command:
        made: click.Command = click.command(**more)(
            taking(*arguments, verb_options(verb), views(operands[0], without=options_of(verb)), JSON, QUIET)(
                function
            )
        )
        return made

    return make


# The options that make a matrix of an operand.
_VIEWS = ("rows", "cols", "isel", "concat", "keep_rows", "keep_cols")
# The options that are filters of .bed files: name, word for the value, type, and help.
FILTERS: tuple[tuple[str, str, Any, str], ...] = (
    (
        "keep",
        "FILE",
        str,
        "Keep only these individuals of .bed files{}: lines with a family and an individual ID",
    ),
    ("extract", "FILE", str, "Keep only these variants of .bed files{}: one variant ID per line"),
    ("maf", "X", float, "Keep only variants of .bed files{} whose rarer allele has at least this frequency"),
    ("chromosomes", "NAMES", str, "Keep only variants of .bed files{} on these chromosomes, such as 1-22,X"),
)


def views(*operands: str, without: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that adds options which make matrices of operands (`oocgemm.cli.matrices`).

    With several operands, the name of each is part of the options for it. Options in `without` are left out.
    """
    several = len(operands) > 1

    def flags(operand: str) -> list[Callable[[F], F]]:
        prefix, of = (f"{operand}-", f" of {operand.upper()}") if several else ("", "")
        axes = "by position or by name, separated by commas, such as"
        return [
            click.option(
                f"--{prefix}rows",
                metavar="AXES",
                help=f"Axes of an n-d array that are rows{of}, {axes} time.",
            ),
            click.option(
                f"--{prefix}cols",
                metavar="AXES",
                help=f"Axes of an array that are columns{of}, {axes} lat,lon.  [default: all others]",
            ),
            click.option(
                f"--{prefix}isel",
                metavar="AXIS=I|I:J,..",
                help=f"Used part of the axes of an array{of}, such as level=0,time=0:100: an index drops an "
                "axis.",
            ),
            click.option(
                f"--{prefix}concat",
                type=click.IntRange(0, 1),
                metavar="0|1",
                help=f"Join the files{of}, given by a pattern such as 'chr*.bed' or a list @FILE, along rows "
                "(0) or columns (1).  [default: 1 for .bed files, whose columns are variants, else 0]",
            ),
            *(
                click.option(
                    f"--{prefix}keep-{lines}",
                    metavar="FILE",
                    help=f"Keep only these {what}{of}: a .npy file of bool, one for each, or of numbers; or "
                    "a text with one number per line, from 0.",
                )
                for lines, what in (("rows", "rows"), ("cols", "columns"))
            ),
            *(
                click.option(f"--{prefix}{name}", metavar=metavar, type=kind, help=f"{text.format(of)}.")
                for name, metavar, kind, text in FILTERS
                if name not in without
            ),
        ]

    def add(function: F) -> F:
        @wraps(function)
        def call(**options: Any) -> Any:
            from oocgemm.cli.matrices import viewed

            shown = not (options.get("quiet") or options["as_json"])
            for operand in operands:
                prefix = f"{operand}_" if several else ""
                names = (*_VIEWS, *(name for name, *_ in FILTERS if name not in without))
                given = {name: options.pop(f"{prefix}{name}") for name in names}
                options[operand] = viewed(operand.upper(), options[operand], shown=shown, **given)
            return function(**options)

        return taking(*(each for operand in operands for each in flags(operand)))(cast(F, call))

    return add


def option(verb: str | type, name: str, shown: str | None = None) -> Callable[[F], F]:
    """Return a decorator that adds one option of a verb to a command.

    `shown` is the default in the help text, if it is not the default of the library.
    """
    found = options_of(verb)[name]
    is_bool = types_of(verb, name) == {bool}
    if found.flags and not is_bool:  # `transposes` makes one value of these flags
        return taking(*(click.option(flag, is_flag=True, help=text) for flag, text in found.flags))
    (flag, text) = found.flags[0] if found.flags else (_flag(name), f"{found.help} {found.syntax}".strip())
    if is_bool:
        value = {"is_flag": True, "flag_value": not found.default, "default": found.default}
        return click.option(flag, name, help=rendered(text, _flag), **value)
    default = shown or found.shown or ("" if found.default is None else str(found.default))
    suffix = f"  [default: {rendered(default, _flag)}]" if default else ""
    return click.option(
        flag,
        type=_type(found, types_of(verb, name)),
        default=found.default,
        metavar=found.metavar or None,
        help=rendered(text, _flag) + suffix,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _type(found: Option, types: frozenset[Any]) -> Any:
    """Return the click type of an option whose values have some types."""
    if LazyArray in types:  # an operand
        return Place()
    if found.choices:
        return click.Choice(found.choices)
    if types == {int}:
        return int if found.least is found.most is None else click.IntRange(found.least, found.most)
    if types == {float, str}:  # a number or a word: the library tells which
        return str
    known = {float: float, complex: Scalar(), Transform: Changes(), tuple[int, int]: CHUNKS}
    known |= {os.PathLike[str]: click.Path(dir_okay=False)}
    return next((kind for each, kind in known.items() if each in types), str)


def transposes(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the flags --transpose-a, --adjoint-a and those of B by one option per operand; return all."""
    for side in "ab":
        transpose, adjoint = options.pop(f"transpose_{side}"), options.pop(f"adjoint_{side}")
        if transpose and adjoint:
            raise click.UsageError(
                f"--transpose-{side} and --adjoint-{side} exclude each other: drop one of them"
            )
        options[f"trans_{side}"] = "C" if adjoint else "T" if transpose else "N"
    return options
