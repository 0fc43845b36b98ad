"""The README and the docs are correct: code runs, figures are current, and names exist."""

import logging
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.cli.main import cli
from oocgemm.jobs.support import VERBS
from oocgemm.service import confinement
from tests.support import TOP, plink

README = TOP / "README.md"
PAGES = [README, *sorted(page for page in (TOP / "docs").rglob("*.md") if "_build" not in page.parts)]
BLOCK = re.compile(r"(?:<!-- (not run|needs a GPU)\b[^>]*-->\n)?^```(python|sh)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


@dataclass(frozen=True)
class Block:
    """A code block of a page. `mark` is the reason why it must not run, or None."""

    page: Path
    line: int
    mark: str | None
    language: str
    code: str

    def commands(self) -> Iterator[list[str]]:
        """Yield each command of a shell block as a list of words."""
        pending = ""
        for line in self.code.splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation or a command continues on the next line
                continue
            pending = ""
            if words:
                yield words
        assert not pending

    def run(self, names: dict[str, Any], servers: ExitStack) -> None:
        """Run the block in this process, in the current folder.

        `names` is the namespace that all Python blocks of the page share. A server that the block starts runs
        until `servers` is closed.
        """
        where = f"{self.page.relative_to(TOP)}:{self.line}"
        if self.language == "python":
            # Empty lines in front give tracebacks the line numbers of the page.
            exec(compile("\n" * self.line + self.code, where, "exec"), names)
            return
        for words in self.commands():
            if words[:2] == ["oocgemm", "serve"]:
                servers.enter_context(serving(words[1:]))
            elif words[0] == "oocgemm":
                assert not cli.main(words[1:], prog_name="oocgemm", standalone_mode=False), (
                    f"{where}: {words}"
                )
            else:
                assert words[:2] == ["python", "-c"], f"{where}: mark the block, or let a test run {words[0]}"
                exec(words[2], {})


@contextmanager
def serving(arguments: list[str]) -> Iterator[None]:
    """Run a server in a process, as readers do in a first shell. Its TCP port is one that is free here."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "oocgemm", *(each.replace(":8642", f":{port}") for each in arguments)]
    command += [] if confinement.abi() else ["--no-confine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(line.startswith("listening on http") for line in process.stdout)
            yield
        finally:
            process.terminate()


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start(3)].count("\n"), *found.groups()) for found in BLOCK.finditer(text)
    ]


WITH_CODE = [page for page in PAGES if any(not block.mark for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    np.random.seed(26)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with ExitStack() as servers:
            for block in blocks(page):
                if not block.mark:
                    block.run(names, servers)
    finally:
        logging.getLogger("oocgemm").setLevel(logging.NOTSET)


CALLS = re.findall(r"`(oocgemm\.\w+\([^`]*\))`", README.read_text())


@pytest.mark.parametrize("call", CALLS)
def test_a_line_of_the_table_of_the_readme_runs(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(27)
    plink.write_bed(tmp_path / "G.bed", plink.genotypes(rng, 30, 40, missing=0.0))
    for name in ("A", "B", "X", "Y"):
        zarr.create_array(f"{name}.zarr", data=rng.random((40, 40)))
    for name in ("S", "T"):
        zarr.create_array(f"{name}.zarr", data=rng.random((3, 4, 3)))
    eval(call, {"oocgemm": oocgemm, "v": rng.random((40, 2))})


def test_the_readme_has_a_line_for_each_verb() -> None:
    assert {call.partition("(")[0].partition(".")[2] for call in CALLS} >= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_is_not_run_parses(page: Path) -> None:
    for block in blocks(page):
        if block.mark and block.language == "python":
            compile(block.code, str(page), "exec")
        elif block.mark:
            subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)


def test_figures_are_those_of_the_results_files() -> None:
    subprocess.run([sys.executable, str(TOP / "scripts" / "figures.py"), "--check"], check=True)


def options(command: click.Command) -> Iterator[str]:
    """Yield the options of a command and of its subcommands."""
    for parameter in command.params:
        yield from parameter.opts
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from options(below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_and_commands_named_exist(page: Path) -> None:
    text = page.read_text()
    # options of scripts/test, mypy, plink, GCTA, dask, Slurm, curl, useradd, systemctl and podman
    outside = {"--all", "--no-setup", "--strict", "--make-rel", "--host", "--nthreads", "--local-directory"}
    outside |= {
        "--make-king",
        "--genome",
        "--make-bed",
        "--make-grm-alg",
        "--make-grm-xchr",
        "--autosome-num",
        "--maf",
        "--grm",
    }
    outside |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--help"}
    outside |= {"--unix-socket", "--system", "--full", "--now", "--name", "--gpus", "--memory"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - outside <= set(options(cli))
    assert set(re.findall(r"`oocgemm ([\w-]+)", text)) <= set(cli.commands)


def test_modules_and_names_mentioned_exist() -> None:
    names = {name for page in PAGES for name in re.findall(r"`(oocgemm(?:\.\w+)+)", page.read_text())}
    assert names
    for name in sorted(names):
        pkgutil.resolve_name(name)


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    paths = [link for link in LINK.findall(text) if "://" not in link]
    assert paths
    assert [path for path in paths if not (TOP / path).exists()] == []


def test_the_api_page_shows_every_public_name() -> None:
    page = (TOP / "docs" / "reference" / "api.md").read_text()
    # The directive for the module also documents its classes, so only other names must be listed.
    alone = {name for name in oocgemm.__all__ if not isinstance(getattr(oocgemm, name), type)} - set(VERBS)
    assert {name for name in alone if f":: {name}\n" not in page and f"`{name}`" not in page} == set()
    assert ".. automodule:: oocgemm\n   :members:\n" in page


def test_each_verb_has_a_page() -> None:
    pages = {page.stem: page.read_text() for page in (TOP / "docs" / "reference" / "verbs").iterdir()}
    assert set(pages) == set(VERBS)
    for verb, text in pages.items():
        assert text.startswith(f"# {verb}\n\n<!-- verb: {verb} -->\n")


def test_the_citation_and_the_changelog_name_this_version() -> None:
    assert f"version: {oocgemm.__version__}\n" in (TOP / "CITATION.cff").read_text()
    assert f"\n## {oocgemm.__version__}" in (TOP / "CHANGELOG.md").read_text()
