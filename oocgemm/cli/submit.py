"""The command submit: a command for each verb, with the operands and options of its jobs."""

from collections.abc import Callable
from typing import Any

import click

from oocgemm.cli.parameters import FILTERS, Place, option, transposes, views
from oocgemm.cli.process import JSON, F, print_json, taking
from oocgemm.cli.queue import SERVICE, Deadline, JobId, find, finish, wait_for
from oocgemm.jobs.support import COUNT, OPERAND, OPTIONAL, OUT, VERBS
from oocgemm.service.client import Client
from oocgemm.service.job_arguments import job_options
from oocgemm.service.job_spec import parameters

# Defaults of the service that differ from those of the library, as the help shows them.
CHOSEN = dict.fromkeys(("device_memory", "host_memory"), "chosen by the service")
# The options for integers that verbs take as parameters.
COUNTS = {
    "k": click.option(
        "--components",
        "k",
        metavar="N",
        type=int,
        required=True,
        help="Number of components to find, such as 50.",
    )
}
_JOB = (
    click.option("--name", metavar="TEXT", default="", help="Name of the job in lists, such as kinship."),
    click.option(
        "--priority",
        type=int,
        metavar="N",
        default=0,
        show_default=True,
        help="Jobs with a higher priority start first; it may be negative.",
    ),
    click.option(
        "--deadline",
        type=Deadline(),
        metavar="TIME",
        help="The job fails if it has not succeeded by then: 2h from now, or a time such as "
        "2027-01-31T18:00.",
    ),
    click.option(
        "--needs",
        type=JobId(),
        metavar="ID",
        multiple=True,
        help="Start only after this job has succeeded; may be repeated. The last characters of its id are "
        'enough; "last" is the newest job.',
    ),
    click.option("--hold", is_flag=True, help="Do not start the job before `oocgemm release`."),
    click.option("--wait", is_flag=True, help="Wait until the job has ended, and exit with its code."),
    click.option(
        "--dry-run", is_flag=True, help="Submit nothing. Show the plan, and when the job would start."
    ),
)


def _submit(
    verb: str,
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
    if wait and dry_run:
        raise click.UsageError("--wait and --dry-run exclude each other: drop one of them")
    client, options = Client(service), _given(verb, options)
    submit: Callable[..., Any] = getattr(client, verb)
    if dry_run:
        planned = submit(**options, dry_run=True)
        if as_json:
            print_json(planned)
        else:
            from oocgemm.cli.display import print_planned

            print_planned(planned)
        return
    needed = find(client, needs)
    job = submit(name=name, priority=priority, deadline=deadline, needs=needed, held=hold, **options)
    if not as_json:
        click.echo(f"job {job.id} is {job.state}")
    if wait:
        wait_for([job], show=not as_json)
        finish([job], job.info if as_json else None)
    elif as_json:
        print_json(job.info)


def _given(verb: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the operands, and the options that differ from their defaults, by their names in the library."""
    defaults = {name: found.default for name, found in job_options(verb).items()}
    if "transpose_a" in options:
        options = transposes(options)
    return {
        name: value
        for name, value in options.items()
        if value != defaults.get(name) or (name not in defaults and value is not None)
    }


def submitting(verb: str) -> click.Command:
    """Return the command that submits jobs of a verb, with the options of the verb and those of jobs."""
    names = parameters(verb)
    operands = [name for name, kind in names.items() if kind == OPERAND]
    options: list[Callable[[F], F]] = []
    for name, kind in names.items():
        if kind == COUNT:
            options.append(COUNTS[name])
        elif kind == OPTIONAL:
            options.append(option(verb, name))
        else:
            options.append(click.argument(name, type=Place()))
    options += [
        option(verb, name, CHOSEN.get(name)) for name, found in job_options(verb).items() if found.cli
    ]
    called = f"submit {verb.replace('_', '-')}" if verb != "gemm" else "submit"

    def command(**options: Any) -> None:
        _submit(verb, **options)

    # The filters would read .bed files here, and only the service knows where they are.
    shown = views(*operands, without=[name for name, *_ in FILTERS])
    return click.command(
        called.rpartition(" ")[2], help=_help(verb, called), cls=_Submit if verb == "gemm" else None
    )(taking(*options, *_JOB, SERVICE, JSON, shown)(command))


def _help(verb: str, called: str) -> str:
    where = (
        "ROOT:PATH, such as data:dir/A.zarr, where ROOT is a folder that `oocgemm serve` was given. With a "
        "service on this machine, they may be local paths beneath such a folder."
    )
    if verb != "gemm":
        return (
            f"Submit a job of `oocgemm {called.partition(' ')[2]}` to a service, which computes it in the "
            f"background.\n\nOperands and result are {where}"
        )
    return (
        f"Submit a product to a service, which computes it in the background.\n\nA, B and C are {where}\n\n"
        f"`oocgemm submit VERB ...` submits a job of another verb: {', '.join(sorted(COMMANDS))}. Its "
        "operands and options are those of `oocgemm VERB`; `oocgemm submit VERB --help` lists them.\n\n"
        "Example: oocgemm submit data:A.zarr data:B.zarr out:C.zarr --device-memory 2GiB --wait"
    )


class _Submit(click.Command):
    """The command for products, or that of the verb that the first argument names."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in COMMANDS:
            return submitting(COMMANDS[args[0]]).make_context(
                f"{info_name} {args[0]}", args[1:], parent, **extra
            )
        return super().make_context(info_name, args, parent, **extra)


# The verbs that have a command, by its name. Reductions and arrays in memory have none.
COMMANDS = {
    verb.replace("_", "-"): verb
    for verb, facts in VERBS.items()
    if verb != "gemm" and {*facts.parameters.values()} <= {OPERAND, OPTIONAL, COUNT, OUT}
}

submit = submitting("gemm")
