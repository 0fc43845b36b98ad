"""The command submit."""

from typing import Any

import click

from oocgemm.cli.parameters import Place, option, transposes
from oocgemm.cli.process import JSON, print_json, taking
from oocgemm.cli.queue import SERVICE, Deadline, JobId, find, finish, wait_for
from oocgemm.service.client import Client
from oocgemm.service.job_planner import job_options

# Defaults of the service that differ from those of the library, as the help shows them.
CHOSEN = dict.fromkeys(("device_memory", "host_memory"), "chosen by the service")


@click.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place())
@taking(*(option("gemm", name, CHOSEN.get(name)) for name in job_options()))
@click.option("--name", metavar="TEXT", default="", help="Name of the job in lists, such as kinship.")
@click.option(
    "--priority",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="Jobs with a higher priority start first; it may be negative.",
)
@click.option(
    "--deadline",
    type=Deadline(),
    metavar="TIME",
    help="The job fails if it has not succeeded by then: 2h from now, or a time such as 2027-01-31T18:00.",
)
@click.option(
    "--needs",
    type=JobId(),
    metavar="ID",
    multiple=True,
    help="Start only after this job has succeeded; may be repeated. The last characters of its id are "
    'enough; "last" is the newest job.',
)
@click.option("--hold", is_flag=True, help="Do not start the job before `oocgemm release`.")
@click.option("--wait", is_flag=True, help="Wait until the job has ended, and exit with its code.")
@click.option("--dry-run", is_flag=True, help="Submit nothing. Show the plan, and when the job would start.")
@taking(SERVICE, JSON)
def submit(
    a: str,
    b: str,
    c: str,
    *,
    name: str,
    priority: int,
    deadline: float | None,
    needs: tuple[str, ...],
    hold: bool,
    wait: bool,
    dry_run: bool,
    service: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Submit a product to a service, which computes it in the background.

    A, B and C are ROOT:PATH, such as data:dir/A.zarr, where ROOT is a folder that `oocgemm serve` was given.
    With a service on this machine, they may be local paths beneath such a folder.

    Example: oocgemm submit data:A.zarr data:B.zarr out:C.zarr --device-memory 2GiB --wait
    """
    if wait and dry_run:
        raise click.UsageError("--wait and --dry-run exclude each other: drop one of them")
    client, options = Client(service), _given(options)
    if dry_run:
        planned = client.plan(a, b, c, **options)
        if as_json:
            print_json(planned)
        else:
            from oocgemm.cli.display import print_planned

            print_planned(planned)
        return
    needed = find(client, needs)
    job = client.submit(
        a, b, c, name=name, priority=priority, deadline=deadline, needs=needed, held=hold, **options
    )
    if not as_json:
        click.echo(f"job {job.id} is {job.state}")
    if wait:
        wait_for([job], show=not as_json)
        finish([job], job.info if as_json else None)
    elif as_json:
        print_json(job.info)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults, under their names in `oocgemm.gemm`."""
    defaults = {option.name: option.default for option in click.get_current_context().command.params}
    defaults |= {"trans_a": "N", "trans_b": "N"}
    return {
        name: value
        for name, value in transposes(options).items()
        if value != defaults.get(name) and (value is not False or defaults.get(name) is True)
    }
