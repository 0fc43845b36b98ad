"""The commands that show what is known and measure nothing: report, info."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from oocgemm.cli.display import print_comparison, print_info, print_report
from oocgemm.cli.printing import JSON, print_json, taking
from oocgemm.cli.queue import SERVICE, SHORT, JobId, find
from oocgemm.machine import info as system
from oocgemm.reports import exports
from oocgemm.service.client import Client
from oocgemm.system.text import plain
from oocgemm.timeline import Timeline, damage, read_log, same_product
from oocgemm.timeline import report as figures_of


@click.command()
@click.argument("timeline", type=click.Path(), required=False)
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "--job",
    "jobs",
    type=JobId(),
    metavar="ID",
    multiple=True,
    help="Report on this job of a service instead of a file; give it twice to compare two jobs. The last "
    'characters of its id are enough; "last" is the newest job.',
)
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write a self-contained page with charts to this file."
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as SVG.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as PNG.")
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Write a trace for ui.perfetto.dev to this file."
)
@taking(SERVICE, JSON)
def report(
    timeline: str | None,
    other: str | None,
    jobs: tuple[str, ...],
    service: str | None,
    as_json: bool,
    **outputs: str | None,
) -> None:
    """Show what limited the speed of a run, and what to change.

    TIMELINE is a file that `oocgemm run --timeline` wrote. With OTHER, a second such file, the two runs are
    compared.

    Example: oocgemm report run.jsonl --html run.html
    """
    logs = [path for path in (timeline, other) if path is not None]
    if bool(logs) == bool(jobs):
        raise click.UsageError("give a TIMELINE, or --job ID for a job of a service")
    if len(jobs) > 2:
        raise click.UsageError(f"--job was given {len(jobs)} times, and at most two jobs can be compared")
    exports.check_outputs(outputs)
    if jobs:
        logs, recorded = _of_jobs(jobs, service)
    else:
        recorded = [read_log(log) for log in logs]
    with damage(*logs):
        figures = [figures_of(one) for one in recorded]
        written = exports.export(logs, recorded, outputs)
        if as_json:
            several = {"same_product": same_product(recorded), "runs": [one.to_dict() for one in figures]}
            print_json(figures[0].to_dict() if len(logs) == 1 else several)
            return
        if len(logs) == 1:
            print_report(figures[0], recorded[0], advise=True)
        else:
            print_comparison(logs, figures, recorded)
    for what, path in written:
        click.echo(plain(f"{what}: {path}"))


def _of_jobs(ids: Sequence[str], service: str | None) -> tuple[list[str], list[Timeline]]:
    """Return names for the jobs of a service, and their timelines."""
    jobs = find(Client(service), ids)
    with TemporaryDirectory() as folder:
        path = Path(folder, "timeline")
        recorded = []
        for job in jobs:
            job.timeline(path)
            recorded.append(read_log(str(path)))
    return [job.info["name"] or f"job {job.id[-SHORT:]}" for job in jobs], recorded


@click.command()
@JSON
def info(as_json: bool) -> None:
    """Show what is installed, how fast it is, and what is missing.

    The rates are those that a plan in the current folder would use: measured by `oocgemm calibrate`, or
    assumed. Each missing part is listed with the command that installs or measures it.
    """
    found = system.info()
    if as_json:
        print_json(found)
    else:
        print_info(found)
