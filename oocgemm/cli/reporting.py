"""The commands that show what is known and measure nothing: report, info."""

import click

from oocgemm.cli.basics import JSON
from oocgemm.cli.display import print_comparison, print_info, print_report
from oocgemm.cli.output import print_json
from oocgemm.machine import info as system
from oocgemm.reports import exports
from oocgemm.timeline import read_log, same_product
from oocgemm.timeline import report as figures_of


@click.command()
@click.argument("timeline", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write a self-contained page with charts to this file."
)
@click.option("--svg", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as SVG.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write the Gantt chart to this file, as PNG.")
@click.option(
    "--trace", type=click.Path(dir_okay=False), help="Write a trace for ui.perfetto.dev to this file."
)
@JSON
def report(timeline: str, other: str | None, as_json: bool, **outputs: str | None) -> None:
    """Show what limited the speed of a run, and what to change.

    TIMELINE is a file that `oocgemm run --timeline` wrote. With OTHER, a second such file, the two runs are
    compared.

    Example: oocgemm report run.jsonl --html run.html
    """
    logs = [timeline, *([other] if other else [])]
    recorded = [read_log(log) for log in logs]
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
        click.echo(f"{what}: {path}")


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
