#!/usr/bin/env python
"""Write the generated parts of the README and the docs: tables, outputs of commands, and pictures.

They come from scripts/bench/results/ and from the program itself. In a page, a generated part is between two
comments, `<!-- begin NAME -->` and `<!-- end NAME -->`.

usage: scripts/figures.py [--check]    --check: only say which files are out of date
"""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import gallery
import gram_tables
import grid_tables
import ladder_tables
import plan_tables
import storage_tables
import tables

from oocgemm.cli.display import print_plan, print_report
from oocgemm.planning import Budgets, Chunked, GemmProblem, Layouts, default_model, make_plan
from oocgemm.planning.units import format_size
from oocgemm.reports.charts import roofline, svg
from oocgemm.stores import new_layout
from oocgemm.timeline import read_log, report

TOP = Path(__file__).resolve().parent.parent
IMAGES = TOP / "docs" / "images"
LOG, SLOW = tables.RESULTS / "report.jsonl", tables.RESULTS / "slow.jsonl"
BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def fenced(show: Callable[[], None]) -> str:
    """Return what a command prints, as a Markdown block of the width of a page."""
    os.environ["COLUMNS"] = "110"
    with redirect_stdout(io.StringIO()) as printed:
        show()
    return (
        "```text\n" + "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines()) + "\n```"
    )


def plan() -> None:
    """Return the output of `oocgemm plan` for an H200, which this machine need not have."""
    names = "float64", "float64", "float64", "float64"
    problem, chunks = GemmProblem.of(32768, 32768, 524288, *names), Chunked((2048, 2048))
    layouts = Layouts(chunks, chunks, new_layout("C.zarr", problem, None, None))
    print_plan(make_plan(problem, Budgets(8 << 30, 24 << 30), default_model("cuda", 16), layouts))


def reported() -> None:
    """Return the output of `oocgemm report` for the timeline in scripts/bench/results/."""
    timeline = read_log(LOG)
    print_report(report(timeline), timeline, advise=True)


def caption(log: Path) -> str:
    """Return what the picture of a timeline shows."""
    timeline = read_log(log)
    plan, device = timeline.header["plan"], timeline.header["backend"]["device"]
    problem, operands = plan["problem"], timeline.header["operands"].values()
    return (
        f"This is the timeline of a {problem['a_dtype']} product of {problem['m']} x {problem['k']} x "
        f"{problem['n']} on one {device}, with `--compute {problem['compute']}`, from and to "
        f"{' and '.join(sorted({each['store'] for each in operands}))}. It took "
        f"{timeline.wall / 1e9:.2g} s within {format_size(plan['budget']['device'])} of GPU memory. "
        f"The kernel ran in {report(timeline).compute_share:.0%} of this time."
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "plan": lambda: fenced(plan),
    "report": lambda: fenced(reported),
    "caption": lambda: caption(LOG),
    "example": lambda: caption(LOG).replace("timeline of", "report on"),
    "slow": lambda: caption(SLOW),
} | {
    name: lambda make=make: "\n".join(make())  # type: ignore[misc]
    for name, make in {
        "two-commands": tables.two_commands,
        "supported": tables.supported,
        "results": tables.results,
        "streamed": tables.streamed,
        "peers": tables.peers,
        "from-disk": tables.from_disk,
        "on-cores": tables.on_cores,
        "safeguards": tables.safeguards,
        "served": tables.served,
        "queued": tables.queued,
        "hdf5": storage_tables.hdf5,
        "chunks": storage_tables.chunks,
        "sparse": storage_tables.sparse,
        "decoding": storage_tables.decoding,
        "encoding": storage_tables.encoding,
        "libraries": tables.libraries,
        "grams": gram_tables.grams,
        "transformed": gram_tables.transformed,
        "similar": tables.similar,
        "nearest": tables.nearest,
        "fits": tables.fits,
        "devices": tables.on_devices,
        "diagnosed": tables.diagnosed,
        "traffic": tables.traffic,
        "recorded": tables.recorded,
        "rates": plan_tables.rates,
        "ablation": plan_tables.ablation,
        "emulated": tables.emulated,
        "grid": grid_tables.grid,
        "losses": grid_tables.losses,
        "directions": grid_tables.directions,
        "calls": grid_tables.calls,
        "commands": grid_tables.commands,
        "processes": grid_tables.processes,
        "rungs": ladder_tables.rungs,
        "gains": ladder_tables.gains,
        "fast": ladder_tables.fast,
        "counted": ladder_tables.counted,
    }.items()
}


@cache
def block(name: str) -> str:
    return BLOCKS[name]()


def filled(text: str) -> str:
    """Return a page with its generated parts computed anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", text)


def pages() -> list[Path]:
    """Return the paths of the README and of the pages of the docs."""
    docs = TOP / "docs"
    return [TOP / "README.md", *sorted(p for p in docs.rglob("*.md") if "_build" not in p.parts)]


def main() -> None:
    made = {page: filled(page.read_text()) for page in pages()}
    made[IMAGES / "report.svg"] = svg(read_log(LOG), "run.jsonl")
    made[IMAGES / "slow.svg"] = svg(read_log(SLOW), "slow.jsonl")
    made |= {IMAGES / name: text for name, text in gallery.pictures().items()}
    made[IMAGES / "roofline.svg"] = roofline(**tables.load("roofline.json"))
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(path.relative_to(TOP)) for path in stale)
        sys.exit(f"out of date: {names}; run scripts/figures.py" if stale else 0)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path])


if __name__ == "__main__":
    main()
