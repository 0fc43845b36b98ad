"""Every option is written down once: functions, commands and documentation take it from one table."""

import inspect
from typing import Any, get_args, get_type_hints

import click
import pytest

import oocgemm
from oocgemm.cli.main import cli
from oocgemm.jobs import support
from oocgemm.jobs.options import VERBS, options_of

# The command of each verb that has one.
COMMANDS = {"run": "gemm"} | {name: name for name in ("gram", "corr", "cov", "similarity", "grm", "pca")}
COMMANDS |= {name: name for name in ("neighbors", "distances", "lstsq", "ridge", "svd")}
COMMANDS |= {name.replace("_", "-"): name for name, verb in support.VERBS.items() if verb.command}


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(oocgemm, verb)).parameters)


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_takes_exactly_the_options_of_its_verb(verb: str) -> None:
    options, given = options_of(verb), parameters(verb)
    (shared,) = get_args(get_type_hints(getattr(oocgemm, verb), include_extras=True)["options"])
    own = {name for name, each in given.items() if each.kind is each.KEYWORD_ONLY} - {"plan", "to"}
    assert own | {*shared.__annotations__} == {*options}
    for name in own:
        required = given[name].default is inspect.Parameter.empty
        assert given[name].default == options[name].default or (required and options[name].default is None)


@pytest.mark.parametrize("verb", VERBS)
def test_the_documentation_names_each_option(verb: str) -> None:
    text = " ".join((inspect.getdoc(getattr(oocgemm, verb)) or "").split())
    assert "{options}" not in text
    for name in options_of(verb):
        assert f" {name}: " in text or f" {name}," in text or f" {name}." in text, name


@pytest.mark.parametrize(("command", "verb"), COMMANDS.items())
def test_a_command_takes_the_options_of_its_verb_with_their_defaults(command: str, verb: str) -> None:
    given: dict[str | None, Any] = {each.name: each for each in cli.commands[command].params}
    for name, option in options_of(verb).items():
        if not option.cli:
            assert name not in given
        elif name.startswith("trans_"):
            assert {name.replace("trans", each) for each in ("transpose", "adjoint")} <= {*given}
        else:
            assert isinstance(given[name], click.Option)
            assert given[name].default == option.default


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"gram\(\) got an unexpected option 'trans_a': it takes alpha, "):
        oocgemm.gram([[1.0]], trans_a="T")  # type: ignore[call-overload]
