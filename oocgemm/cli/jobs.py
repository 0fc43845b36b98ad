"""What the commands of the queue share: the service, ids of jobs, waiting, exit codes."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any

import click
from click.shell_completion import CompletionItem

from oocgemm.cli.output import EXIT_FAILED
from oocgemm.errors import InputError, OocGemmError
from oocgemm.service.client import Client, Job
from oocgemm.service.protocol import State, UnknownJobError
from oocgemm.system.text import plain

# Characters of an id, and how many of its last ones lists show at least.
ID_LENGTH, SHORT = 26, 6
LAST = "last"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Ids that the shell offers as completions.
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
    """A time, as seconds since 1970. It is written as a duration from now, or in ISO 8601."""

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
    """Return jobs by their ids.

    Args:
        client: of the service.
        texts: each is an id, the last characters of one, or ``last`` for the newest job.

    Raises:
        InputError: there is no such job, or there are several.
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
    """Return the exit code of a job that has ended: 0 if it succeeded, and else never 0."""
    if job.state == State.SUCCEEDED:
        return 0
    code = job.exit_code or EXIT_FAILED  # a job that never started has none
    return 128 - code if code < 0 else code


def wait_for(jobs: Sequence[Job], show: bool) -> int:
    """Wait until jobs have ended, and return the largest of their exit codes.

    Args:
        jobs: the jobs.
        show: whether to show the progress on stderr.
    """
    with continuing(jobs):
        if show:
            from oocgemm.cli.doing import doing

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
    """Say that jobs continue if the user interrupts the command that waits for them.

    `again` is the command to wait again.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        ids = " ".join(job.id for job in jobs)
        error.add_note(f"The service continues. To wait again: oocgemm {again} {ids}")
        raise
