"""The README tells the truth: its numbers are those of the results files, its options exist."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from oocgemm.cli.main import cli

TOP = Path(__file__).resolve().parent.parent


def test_tables_and_outputs_are_those_of_the_results_files() -> None:
    subprocess.run([sys.executable, str(TOP / "scripts" / "readme.py"), "--check"], check=True)


def options(command: click.Command) -> Iterator[str]:
    """The options of a command and of those below it."""
    for parameter in command.params:
        yield from parameter.opts
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from options(below)


def test_every_option_and_command_named_exists() -> None:
    text = (TOP / "README.md").read_text()
    known = set(options(cli))
    outside = {
        "--all",
        "--no-setup",
        "--strict",
        "--help",
    }  # of scripts/test, of mypy, of every command
    named = set(re.findall(r"--[a-z][a-z-]+", text)) - outside
    assert named
    assert named <= known
    assert set(re.findall(r"`oocgemm (\w+)", text)) <= set(cli.commands)
