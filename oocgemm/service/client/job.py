"""A job of the service, as its user sees it."""

import codecs
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oocgemm.errors import InputError
from oocgemm.service.client.problems import error_of
from oocgemm.service.client.stream import messages
from oocgemm.service.client.transport import ANSWER_SECONDS, LONG_PATIENCE, PATIENCE, Transport
from oocgemm.service.errors import ConflictError, WaitTimeoutError
from oocgemm.service.states import FINAL, Action, State

# Seconds for which the server delays an answer if nothing has changed, and the pause if it does not.
POLL_SECONDS, PAUSE_SECONDS = 30.0, 0.5
# Seconds between two looks at a log that grows.
FOLLOW_SECONDS = 1.0
# Actions that put a job into the queue, and states that show that it has been there since.
_QUEUEING = frozenset({Action.RELEASE, Action.RESUME, Action.RETRY})
_STARTED = frozenset({State.STARTING, State.RUNNING, State.SUCCEEDED})


@dataclass(frozen=True)
class Progress:
    """How far a job is: its state, and how many of its tiles of C are done.

    `total` is 0 as long as the number of tiles is unknown.
    """

    state: str
    done: int
    total: int


class Job:
    """A job of the service.

    `info` is the job as it was last read, as plain data: for example ``info["reason"]`` says why it waits,
    and ``info["predicted_start"]`` when it will start, in seconds since 1970. `refresh` reads it again.
    """

    def __init__(self, transport: Transport, info: dict[str, Any]) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """The id of the job, of 26 characters."""
        return str(self.info["id"])

    @property
    def state(self) -> str:
        """The state as last read, such as "queued", "running", "succeeded", "failed" or "cancelled"."""
        return str(self.info["state"])

    @property
    def ended(self) -> bool:
        """Whether the job had succeeded, failed or been cancelled when it was last read."""
        return self.state in FINAL

    @property
    def error(self) -> str | None:
        """Why the job failed; None if it has not."""
        error: str | None = self.info["error"]
        return error

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job's process; None if it has not ended."""
        code: int | None = self.info["exit_code"]
        return code

    @property
    def warnings(self) -> list[str]:
        """What in the data changes what the result means: each `oocgemm.DataWarning` of the job."""
        return list(self.info.get("warnings", ()))

    def refresh(self) -> "Job":
        """Read the job again, and return it.

        Raises:
            UnknownJobError: the job has been deleted.
        """
        self.info = self._transport.call("GET", self._path()).json()
        return self

    def wait(self, timeout: float | None = None) -> "Job":
        """Wait until the job has ended, and return it. Its `state` tells whether it succeeded.

        The server may be restarted meanwhile: the connection is made again for up to 600 s.

        Args:
            timeout: the maximum time to wait, in seconds.

        Raises:
            WaitTimeoutError: the job has not ended in that time.
            UnavailableError: no server has answered for 600 s.
            UnknownJobError: the job has been deleted.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self.ended:
            left = POLL_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(
                    f"job {self.id} is {self.state} after {timeout:g} s: wait longer, or cancel it"
                )
            self._poll(min(left, POLL_SECONDS), LONG_PATIENCE if until is None else left)
        return self

    def progress(self) -> Iterator[Progress]:
        """Yield the progress of the job whenever it changes, until the job has ended. `done` never falls.

        The server may be restarted meanwhile, as in `wait`.

        Raises:
            UnavailableError: no server has answered for 600 s.
            UnknownJobError: the job has been deleted.
        """
        shown = self._progress()
        yield shown
        if self.ended:
            return
        for message in messages(self._transport, self._path("events")):
            if message.kind == "progress":
                data = message.json().get("data") or {}
                now = Progress(self.state, int(data.get("done", 0)), int(data.get("total", 0)))
            else:
                # The events of earlier attempts are replayed too, so the state is read from the job.
                self._poll(0, LONG_PATIENCE)
                now = self._progress()
            # The job may have been read after the stream sent an older count.
            now = replace(now, done=max(now.done, shown.done))
            if now != shown:
                yield now
                shown = now
            if self.ended:
                return

    def cancel(self) -> "Job":
        """Cancel the job, and return it. A run stops after the present step. Finished tiles are kept.

        All actions are idempotent. They raise `ConflictError` if the state of the job does not allow them.
        """
        return self._act(Action.CANCEL)

    def hold(self) -> "Job":
        """Keep a queued job from starting, and return it."""
        return self._act(Action.HOLD)

    def release(self) -> "Job":
        """Let a held job start, and return it."""
        return self._act(Action.RELEASE)

    def pause(self) -> "Job":
        """Stop a running job so that it can be resumed, and return it."""
        return self._act(Action.PAUSE)

    def resume(self) -> "Job":
        """Queue a paused job, and return it. Finished tiles are not computed again."""
        return self._act(Action.RESUME)

    def retry(self) -> "Job":
        """Queue a job that failed or was cancelled, and return it. Finished tiles are not computed again."""
        return self._act(Action.RETRY)

    def log(self) -> str:
        """Return what the process of the job has printed."""
        return self._log_from(0, PATIENCE).decode(errors="replace")

    def follow(self) -> Iterator[str]:
        """Yield what the process of the job prints, until the job has ended.

        The server may be restarted meanwhile, as in `wait`.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        read, last = 0, False
        while True:
            data = self._log_from(read, LONG_PATIENCE)
            read += len(data)
            if text := decoder.decode(data, final=last):
                yield text
            if last:
                return
            if not self.ended:
                self._poll(FOLLOW_SECONDS, LONG_PATIENCE)
            last = self.ended  # what was printed before the end is read once more

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the run, an HTML page, to a file.

        Raises:
            InputError: the file cannot be written.
            ServiceError: there is no report, since no attempt has got that far.
        """
        self._save("report", path)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of the run to a file, for `oocgemm.report`. Raises what `report` raises."""
        self._save("timeline", path)

    def _save(self, part: str, path: str | os.PathLike[str]) -> None:
        data = self._transport.call("GET", self._path(part)).body
        new = Path(f"{os.fspath(path)}.new")
        try:
            new.write_bytes(data)
            os.replace(new, path)
        except OSError as error:
            raise InputError(f"the {part} cannot be written to {path}: {error.strerror}") from error

    def _path(self, rest: str = "") -> str:
        return f"/v1/jobs/{quote(self.id, safe='')}" + (f"/{rest}" if rest else "")

    def _progress(self) -> Progress:
        found = self.info["progress"] or {"done": 0, "total": 0}
        return Progress(self.state, found["done"], found["total"])

    def _poll(self, seconds: float, patience: float) -> None:
        """Read the job again as soon as it has changed, or after so many seconds."""
        begun = time.monotonic()
        answer = self._transport.request(
            "GET",
            self._path() + (f"?wait={seconds:.3f}" if seconds else ""),
            headers={"If-None-Match": f'"{self.info["version"]}"'} if seconds else {},
            patience=patience,
            answer_seconds=seconds + ANSWER_SECONDS,
        )
        if answer.status >= 400:
            raise error_of(answer.status, answer.body)
        if answer.status != HTTPStatus.NOT_MODIFIED:
            self.info = answer.json()
        elif time.monotonic() - begun < seconds / 2:  # the server is shutting down, for example
            time.sleep(min(PAUSE_SECONDS, seconds))

    def _act(self, action: Action) -> "Job":
        answer = self._transport.request("POST", self._path(action))
        if answer.status >= 400:
            error = error_of(answer.status, answer.body)
            repeated = isinstance(error, ConflictError) and answer.lost and action in _QUEUEING
            if repeated and self.refresh().state in _STARTED:
                return self  # the first attempt was carried out, and the job has started since
            raise error
        self.info = answer.json()
        return self

    def _log_from(self, start: int, patience: float) -> bytes:
        """Return the bytes of the log from a place on; none if it has not been begun."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        answer = self._transport.request("GET", self._path("log"), headers=headers, patience=patience)
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""
        if answer.status >= 400:
            raise error_of(answer.status, answer.body)
        # A proxy may ignore the range.
        return answer.body if answer.status == HTTPStatus.PARTIAL_CONTENT else answer.body[start:]
