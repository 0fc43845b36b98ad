"""The public API is written down in `public_api.txt`, and changes only on purpose.

`python -m tests.repository.test_public_api` writes the file anew. docs/reference/stability.md has the policy.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import oocgemm
from oocgemm.cli.main import COMMANDS, cli
from oocgemm.jobs.options import VERBS, options_of

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def parameters(name: str, function: Any) -> Iterator[str]:
    """Yield the parameters of a function, with the options that it takes as keywords."""
    options = options_of(name) if name in VERBS else {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            if name not in VERBS:
                yield f"**{parameter.name}"
            continue
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        keyword = "keyword " if parameter.kind is parameter.KEYWORD_ONLY else ""
        options.pop(parameter.name, None)
        yield f"{keyword}{star}{parameter.name}{default}"
    yield from sorted(f"keyword {name} = {option.default!r}" for name, option in options.items())


def members(kind: type) -> Iterator[str]:
    """Yield the public fields, properties and methods of a class."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("oocgemm")]
    names = {name for each in own for name in (*vars(each), *vars(each).get("__annotations__", ()))}
    for name in sorted(names):
        if not name.startswith("_"):
            value = inspect.getattr_static(kind, name, None)
            yield f"{name}()" if inspect.isroutine(value) else name


def described() -> str:
    """Return the public API as text: a paragraph for each name, and one for each command."""
    paragraphs = []
    for name in sorted(oocgemm.__all__):
        value = getattr(oocgemm, name)
        if inspect.isclass(value):
            lines = [f"class {name}", *members(value)]
        elif callable(value):
            lines = [f"def {name}", *parameters(name, value)]
        elif get_args(value) or not isinstance(value, str):
            lines = [f"type {name}"]
        else:
            lines = [f"name {name}"]
        paragraphs.append("\n    ".join(lines))
    for name in COMMANDS:
        options = sorted(each for parameter in cli.commands[name].params for each in parameter.opts)
        paragraphs.append("\n    ".join([f"command {name}", *options]))
    text = "\n\n".join(paragraphs) + "\n"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_the_public_api_is_that_of_the_snapshot() -> None:
    assert described() == SNAPSHOT.read_text(), (
        "the public API has changed: follow docs/reference/stability.md, then run "
        "python -m tests.repository.test_public_api"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(described())
