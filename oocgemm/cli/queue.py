"""The commands on jobs of a service: lists, waiting, actions and logs, and how they find jobs by ids."""

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any

import click
from click.shell_completion import CompletionItem

from oocgemm.cli.process import EXIT_FAILED, JSON, exit_code, print_error, print_json, print_note, taking
from oocgemm.errors import InputError, OocGemmError
from oocgemm.service.client import Client, Job
from oocgemm.service.protocol import ACTIVE, FINAL, ID_LENGTH, SHORT, State, UnknownJobError
from oocgemm.system.text import LINES, plain

LAST = "last"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Maximum number of ids that the shell offers as completions.
_OFFERED = 50

SERVICE = click.option(
    "--service",
    metavar="URL",
    help="Address of the service, such as https://gpu1:8642 or the path of its socket. A URL needs a token "
    "in $OOCGEMM_TOKEN.  [default: $OOCGEMM_SERVICE, or the socket in the default state folder]",
)


class JobId(click.ParamType[str]):
    """The id of a job, its last characters, or ``last``. The shell completes it from the live jobs."""

    name = "id"

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        try:
            jobs = list(islice(Client(ctx.params.get("service")).jobs(limit=_OFFERED), _OFFERED))
        except OocGemmError:  # a completion must print no error
            return []
        return [
            CompletionItem(job.id, help=plain(f"{job.state} {job.info['name']}").strip())
            for job in jobs
            if job.id.startswith(incomplete.upper())
        ]


class Deadline(click.ParamType[float]):
    """A time in seconds since 1970. Users write a duration from now, or a time in ISO 8601."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        now, text = time.time(), str(value).strip()
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
            return now + float(found[1]) * _SECONDS[found[2]]
        try:
            at = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time: write one such as 2h, 30m or 2027-01-31T18:00", param, ctx)
        if at <= now:
            self.fail(f"{value!r} lies in the past: the deadline must be later than now", param, ctx)
        return at


def find(client: Client, texts: Sequence[str]) -> list[Job]:
    """Return jobs by ids, their last characters, or ``last`` for the newest one.

    Raises `InputError` if a text fits no job, or several jobs.
    """
    found: dict[str, Job] = {}
    suffixes = dict[str, str]()
    for text in texts:
        if text == LAST:
            newest = next(client.jobs(limit=1), None)
            if newest is None:
                raise InputError("there is no job yet: submit one with oocgemm submit")
            found[text] = newest
        elif len(text) == ID_LENGTH:
            try:
                found[text] = client.job(text.upper())
            except UnknownJobError as error:
                raise InputError(str(error)) from error
        else:
            suffixes[text] = text.upper()
    if suffixes:
        for job in client.jobs():
            for text, suffix in suffixes.items():
                if not job.id.endswith(suffix):
                    continue
                if text in found:
                    raise InputError(
                        f"{text} may be job {found[text].id} or job {job.id}: give more characters of the id"
                    )
                found[text] = job
    if missing := next((text for text in texts if text not in found), None):
        raise InputError(f"no job has an id that ends with {missing}: list them with oocgemm queue --all")
    return list({job.id: job for job in map(found.__getitem__, texts)}.values())


def exit_code_of(job: Job) -> int:
    """Return the exit code of a job that has ended: 0 if it succeeded, otherwise not 0."""
    if job.state == State.SUCCEEDED:
        return 0
    code = job.exit_code or EXIT_FAILED  # a job that never started has none
    return 128 - code if code < 0 else code


def wait_for(jobs: Sequence[Job], show: bool) -> int:
    """Wait until jobs have ended; with `show`, print their progress. Return their largest exit code."""
    with continuing(jobs):
        if show:
            from oocgemm.cli.display import doing

            with doing(True) as say:
                for job in jobs:
                    for progress in job.progress():
                        tiles = f", {progress.done} of {progress.total} tiles" if progress.total else ""
                        say(f"{job.id[-SHORT:]} {progress.state}{tiles}")
        else:
            for job in jobs:
                job.wait()
    return max(map(exit_code_of, jobs))


@contextmanager
def continuing(jobs: Sequence[Job], again: str = "wait") -> Iterator[None]:
    """If the user interrupts the `with` block, print that jobs continue, and a command to wait for them."""
    try:
        yield
    except KeyboardInterrupt as error:
        ids = " ".join(job.id for job in jobs)
        error.add_note(f"The service continues. To wait again: oocgemm {again} {ids}")
        raise


_IDS = click.argument("ids", nargs=-1, required=True, type=JobId(), metavar="ID...")
_ID = click.argument("id_", type=JobId(), metavar="ID")
_LIVE = [state for state in State if state not in FINAL]


@click.command()
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State]),
    help="Only jobs in this state; may be repeated.  [default: all jobs that have not ended]",
)
@click.option("--all", "everything", is_flag=True, help="Also list jobs that have ended.")
@click.option("--owner", metavar="NAME", help="Only jobs of this user.  [default: jobs of all users]")
@taking(SERVICE, JSON)
def queue(
    states: tuple[str, ...], everything: bool, owner: str | None, service: str | None, as_json: bool
) -> None:
    """List the jobs of a service.

    Jobs that run come first, then those that wait, in the order of their predicted starts. The reason says
    why a job waits. The last characters of an id are enough for the other commands.

    Example: oocgemm queue --state failed
    """
    chosen = states or ([] if everything else _LIVE)
    jobs = sorted(Client(service).jobs(states=chosen, owner=owner), key=_order)
    if as_json:
        print_json({"jobs": [job.info for job in jobs]})
        return
    if not jobs and chosen == _LIVE:
        click.echo("no job waits or runs; --all lists those that have ended")
        return
    from oocgemm.cli.display import print_jobs

    print_jobs([job.info for job in jobs])


def _order(job: Job) -> tuple[int, float, float]:
    start = job.info["predicted_start"]
    rank = 0 if job.state in ACTIVE else 2 if job.ended else 1
    created = job.info["created"]
    return rank, float("inf") if start is None else start, -created if job.ended else created


@click.command()
@_ID
@taking(SERVICE, JSON)
def status(id_: str, service: str | None, as_json: bool) -> None:
    """Show a job of a service.

    ID is the id of a job, its last characters, or "last" for the newest job.

    Example: oocgemm status last
    """
    (job,) = find(Client(service), [id_])
    if as_json:
        print_json(job.info)
        return
    from oocgemm.cli.display import print_job

    print_job(job.info)


@click.command()
@_IDS
@taking(SERVICE, JSON)
def wait(ids: tuple[str, ...], service: str | None, as_json: bool) -> None:
    """Wait until jobs have ended.

    The exit code is that of the job, as of `oocgemm run`; for several jobs, the largest one. A job that was
    cancelled before it started has 1. The service may be restarted meanwhile.

    Example: oocgemm wait last && echo done
    """
    jobs = find(Client(service), ids)
    wait_for(jobs, show=not as_json)
    finish(jobs, {"jobs": [job.info for job in jobs]} if as_json else None)


def finish(jobs: list[Job], as_json: object = None) -> None:
    """Print ended jobs, or `as_json` instead. End the command with the largest of their exit codes."""
    if as_json is not None:
        print_json(as_json)
    for job in jobs:
        if as_json is None and job.state == State.SUCCEEDED:
            click.echo(f"job {job.id} succeeded")
        elif job.state != State.SUCCEEDED:
            why = f": {job.error}" if job.error else ""
            print_error(f"job {job.id} {'failed' if job.state == State.FAILED else 'was cancelled'}{why}")
    click.get_current_context().exit(max(map(exit_code_of, jobs)))


def _action(act: Callable[[Job], Job], example: str, text: str) -> click.Command:
    """Return a command that calls `act` for jobs."""

    @click.command(name=act.__name__, help=f"{text}\n\nExample: oocgemm {example}")
    @_IDS
    @taking(SERVICE, JSON)
    def command(ids: tuple[str, ...], service: str | None, as_json: bool) -> None:
        if act is Job.resume:
            _check_no_results(ids)
        code, done = 0, list[dict[str, Any]]()
        for job in find(Client(service), ids):
            try:
                done.append(act(job).info)
            except OocGemmError as error:  # the other jobs are independent of this one
                print_error(str(error))
                code = max(code, exit_code(error))
            else:
                if not as_json:
                    click.echo(plain(f"job {job.id} is {job.state}"))
        if as_json:
            print_json({"jobs": done})
        click.get_current_context().exit(code)

    return command


def _check_no_results(ids: tuple[str, ...]) -> None:
    """Raise `click.UsageError` if one of the ids of jobs is the path of a result."""
    for text in ids:
        if os.path.lexists(text) or not text.isalnum():
            raise click.UsageError(
                f"{text} is no id of a job, and this command continues jobs of a service: to complete the "
                "result of an interrupted run, repeat its command with --resume, such as oocgemm run A B "
                f"{shlex.quote(text)} --resume"
            )


cancel = _action(
    Job.cancel,
    "cancel last",
    "Cancel jobs of a service. Jobs that run stop soon. Their finished tiles are kept, for `oocgemm retry`.",
)
hold = _action(Job.hold, "hold 5QXK2M", "Keep queued jobs from starting, until `oocgemm release`.")
release = _action(Job.release, "release 5QXK2M", "Let held jobs start.")
pause = _action(
    Job.pause, "pause last", "Stop running jobs so that other jobs can run. `oocgemm resume` continues them."
)
resume = _action(Job.resume, "resume last", "Continue paused jobs. Finished tiles are not computed again.")
retry = _action(
    Job.retry,
    "retry last",
    "Queue jobs again that failed or were cancelled. Finished tiles are not computed again.",
)


@click.command()
@_ID
@click.option("-f", "--follow", is_flag=True, help="Print what the job prints, until it has ended.")
@taking(SERVICE, JSON)
def logs(id_: str, follow: bool, service: str | None, as_json: bool) -> None:
    """Show what a job has printed.

    Example: oocgemm logs -f last
    """
    (job,) = find(Client(service), [id_])
    with continuing([job], "logs -f"):
        if as_json:
            text = "".join(job.follow()) if follow else job.log()
            print_json({"id": job.id, "state": job.state, "log": text})
            return
        printed = False
        for text in job.follow() if follow else (job.log(),):
            click.echo(plain(text, keep=LINES), nl=False)
            printed = printed or bool(text)
    if not printed:
        print_note(f"job {job.id} ({job.state}) has printed nothing")
