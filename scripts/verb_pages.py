"""Fill the pages of the verbs: their signatures with real defaults, and a table of all their options.

Sphinx calls `setup`. It then replaces the comment `<!-- verb: NAME -->` in a page by what
`oocgemm.jobs.options` says of the verb, so that the page never differs from the program.
"""

import inspect
import re
from types import GenericAlias
from typing import Any, get_origin

from http_api import table

import oocgemm
from oocgemm.cli.main import COMMANDS
from oocgemm.jobs.option_groups import Option
from oocgemm.jobs.options import options_of, rendered, types_of

MARK = re.compile(r"<!-- verb: (\w+) -->")


def signature(verb: str) -> str:
    """Return the call of a verb, with its operands and its own options; those of `gemm` follow as `...`."""
    known = options_of(verb)
    shown = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(getattr(oocgemm, verb)).parameters.values()
        if parameter.name not in known and parameter.kind is not parameter.VAR_KEYWORD
    ]
    own = [
        f"{name}={option.default!r}"
        for name, option in known.items()
        if verb == "gemm" or not shared(verb, name)
    ]
    call = ", ".join([*shown, "*", *own, *(() if verb == "gemm" else ("**options",))])
    return f"{verb}({call})"


def shared(verb: str, name: str) -> bool:
    """Return whether an option of a verb is the same one as that of `gemm`."""
    return verb != "gemm" and options_of("gemm").get(name) == options_of(verb)[name] and name != "dry_run"


def spelled(kind: Any) -> str:
    """Return a type as users read it."""
    if isinstance(kind, GenericAlias) or get_origin(kind) is not None:
        origin = get_origin(kind).__name__
        return "callable" if origin == "Callable" else "sequence" if origin == "Sequence" else origin
    return "array" if kind.__name__ in ("LazyArray", "WritableArray", "ndarray") else str(kind.__name__)


def row(verb: str, name: str, option: Option) -> tuple[str, str, str, str]:
    kinds = ["dtype"] if name.endswith("dtype") else sorted({spelled(kind) for kind in types_of(verb, name)})
    command = "no"
    if option.cli:
        command = ", ".join(f"`{flag}`" for flag, _ in option.flags) or f"`--{name.replace('_', '-')}`"
    default = rendered(option.shown, "`{}`".format) or (
        "" if option.default in (None, ()) else f"`{option.default!r}`"
    )
    choices = f" Choices: {', '.join(option.choices)}." if option.choices else ""
    text = rendered(f"{option.help} {option.more}".strip(), "`{}`".format) + choices
    return f"`{name}`", " or ".join(kinds), default, f"{text} Command line: {command}.".replace("|", "\\|")


def page(verb: str) -> str:
    """Return what the page of a verb says, as Markdown."""
    heads = "option", "type", "default", "what it does"
    options = options_of(verb)
    own = [row(verb, name, option) for name, option in options.items() if not shared(verb, name)]
    other = [row(verb, name, option) for name, option in options.items() if shared(verb, name)]
    parts = [
        f"```{{eval-rst}}\n.. currentmodule:: oocgemm\n\n.. autofunction:: {signature(verb)}\n```",
        "## Options" if verb == "gemm" else "## Options of its own",
        table(heads, own),
    ]
    if other:
        parts += ["## Options that `gemm` has, too", table(heads, other)]
    name = {"gemm": "run"}.get(verb, verb.replace("_", "-"))
    if name in COMMANDS:
        parts += ["## Command", f"`oocgemm {name}`: {COMMANDS[name][1]} See [the commands](../cli.md)."]
    return "\n\n".join(parts)


def setup(sphinx: Any) -> dict[str, bool]:
    """Fill the pages that Sphinx reads."""

    def read(_: object, name: str, source: list[str]) -> None:
        source[0] = MARK.sub(lambda found: page(found[1]), source[0])

    sphinx.connect("source-read", read)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    import sys

    print(page(sys.argv[1]))
