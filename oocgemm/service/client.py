"""The client of the service, with the standard library only: it submits jobs of verbs, and follows them."""

import codecs
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from uuid import uuid4

from oocgemm.errors import InputError
from oocgemm.jobs.support import COUNT, NUMBERS, OPTIONAL, REDUCTION, VERBS
from oocgemm.service.job_spec import encoded, parameters, with_paths
from oocgemm.service.protocol import FINAL, Action, ConflictError, State, WaitTimeoutError
from oocgemm.service.transport import (
    ANSWER_SECONDS,
    LONG_PATIENCE,
    PATIENCE,
    TOKEN,
    Address,
    Transport,
    error_of,
    messages,
)
from oocgemm.values import dataclass

# Seconds for which the server may delay an answer until something changes, and pause of the client if the
# server answers early without a change.
POLL_SECONDS, PAUSE_SECONDS = 30.0, 0.5
# Seconds between two looks at a log that grows.
FOLLOW_SECONDS = 1.0
# Actions that put a job into the queue, and states which show that a queued job has been started.
_QUEUEING = frozenset({Action.RELEASE, Action.RESUME, Action.RETRY})
_STARTED = frozenset({State.STARTING, State.RUNNING, State.SUCCEEDED})
# Jobs per page of a list.
PAGE = 100
# "root:path" and URLs are sent unchanged. "./x:y" is a local path.
_REMOTE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*:")
_TRANSPOSES = {False: "N", True: "T"}
_Path = str | os.PathLike[str]


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

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the job as last read, with its progress and what limited it."""
        found = self.info["progress"] or {"done": 0, "total": 1}
        bar = f'<progress value="{found["done"]}" max="{max(1, found["total"])}"></progress>'
        told = [self.error, (self.info["result"] or {}).get("verdict"), *self.warnings]
        lines = [f"{self.info['name'] or self.info.get('verb', 'gemm')}: {self.state}", *filter(None, told)]
        return (
            f"<div><b>oocgemm job {escape(self.id)}</b><br>{bar}<br>{'<br>'.join(map(escape, lines))}</div>"
        )

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
        """Read the job again as soon as it has changed, or after this many seconds."""
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
                return self  # an earlier request was carried out, and the job has started since
            raise error
        self.info = answer.json()
        return self

    def _log_from(self, start: int, patience: float) -> bytes:
        """Return the bytes of the log from position `start` on; b"" if there is no log yet."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        answer = self._transport.request("GET", self._path("log"), headers=headers, patience=patience)
        if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""
        if answer.status >= 400:
            raise error_of(answer.status, answer.body)
        # A proxy may ignore the range.
        return answer.body if answer.status == HTTPStatus.PARTIAL_CONTENT else answer.body[start:]


class Client:
    """Submits jobs to a service, and finds them.

    Args:
        url: the address of the server: ``http://HOST:PORT``, ``https://HOST:PORT``, or the path of a unix
            socket. By default $OOCGEMM_SERVICE, or else the socket in the default state folder.
        token: the secret of ``oocgemm token create``, which a server at a URL asks for. By default
            $OOCGEMM_TOKEN.

    All methods raise `OocGemmError`: for example `InputError` for a request that the server refuses,
    `BudgetError` if a memory budget is too small, and `UnavailableError` if no server answers. A request
    whose connection is lost is repeated for up to 60 s, but never carried out twice.

    One client may be used by several threads.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._transport = Transport(Address.parse(url), token or os.environ.get(TOKEN))

    def submit(self, a: _Path, b: _Path, c: _Path, **options: Any) -> Job:
        """Submit a product, and return its job. Other verbs are methods of their own names.

        ``client.similarity("data:E.npy", out="out:nn.zarr", topk=10)`` submits a job of `oocgemm.similarity`.
        The operands of a verb come first, and the place of its result is ``out``. Operands may be paths, and
        what `as_matrix` and `concat` make of paths. With ``dry_run=True``, such a method submits nothing, and
        returns what `plan` does.

        Args:
            a, b, c: arrays, as ``root:path`` or as a local path beneath a root of the service.
            **options: those of `oocgemm.gemm` that say what is computed, such as ``alpha``, ``trans_a``,
                ``device_memory`` and ``overwrite``. The server chooses backend, device and default budgets.
                Options of the job are:

                - ``name``: what the job is called in lists.
                - ``priority``: jobs with a higher priority start first.
                - ``deadline``: the time by which the job must have succeeded, or else it fails. A number is
                  in seconds since 1970.
                - ``needs``: jobs, or their ids, that must succeed before.
                - ``held``: do not start the job before it is released.
        """
        body = self._bodies([{"a": a, "b": b, "c": c} | options])[0]
        return Job(self._transport, self._post("/v1/jobs", body))

    def plan(self, a: _Path, b: _Path, c: _Path, **options: Any) -> dict[str, Any]:
        """Return what would happen if a product were submitted. Nothing is stored.

        Args:
            a, b, c: as for `submit`.
            **options: as for `submit`.

        Returns:
            The ``plan``; ``device_bytes``, ``host_bytes`` and ``disk_bytes`` that the job would occupy; the
            predicted time ``predicted_s``, in seconds; and ``predicted_start``, in seconds since 1970.
        """
        return self._plan({"a": a, "b": b, "c": c} | options)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """Return the method that submits jobs of a verb."""
        if verb not in VERBS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {verb!r}")

        def submit(*operands: Any, dry_run: bool = False, **options: Any) -> Any:
            names = list(parameters(verb))
            if len(operands) > len(names):
                raise TypeError(f"{verb}() takes at most {len(names)} operands: {', '.join(names)}")
            given = {"verb": verb} | dict(zip(names, operands, strict=False)) | options
            if dry_run:
                return self._plan(given)
            return Job(self._transport, self._post("/v1/jobs", self._bodies([given])[0]))

        return submit

    def _plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        body = self._bodies([given])[0]
        found: dict[str, Any] = self._transport.call("POST", "/v1/jobs?dry_run=1", body).json()
        return found

    def map(self, products: Iterable[Sequence[_Path] | Mapping[str, Any]], **options: Any) -> list[Job]:
        """Submit several products, all or none, and return their jobs in the same order.

        Args:
            products: each is ``(a, b, c)``, or a dict of arguments of `submit`, or of the method of another
                ``verb``. A job may need an earlier one of the same call by ``needs=["#0"]``, ``["#1"]`` and
                so on. At most 1000.
            **options: arguments of `submit` for all of them.
        """
        listed = [
            options | (dict(each) if isinstance(each, Mapping) else dict(zip("abc", each, strict=True)))
            for each in products
        ]
        answer = self._post("/v1/batches", {"jobs": self._bodies(listed)})
        return [Job(self._transport, info) for info in answer["jobs"]]

    def job(self, id: str) -> Job:  # noqa: A002
        """Return a job by its id.

        Raises:
            UnknownJobError: there is no such job.
        """
        return Job(self._transport, self._transport.call("GET", f"/v1/jobs/{quote(id, safe='')}").json())

    def jobs(
        self, states: Collection[str] = (), owner: str | None = None, limit: int | None = None
    ) -> Iterator[Job]:
        """Yield jobs from the newest to the oldest.

        Args:
            states: only jobs in one of these states, such as ``["queued", "running"]``; all if empty.
            owner: only jobs of this user.
            limit: the maximum number of jobs.
        """
        query = [("state", str(state)) for state in states]
        query += [("owner", owner)] if owner is not None else []
        return islice(self._pages([*query, ("limit", str(min(limit or PAGE, PAGE)))]), limit)

    def _pages(self, query: list[tuple[str, str]]) -> Iterator[Job]:
        cursor: list[tuple[str, str]] = []
        while True:
            page = self._transport.call("GET", f"/v1/jobs?{urlencode(query + cursor)}").json()
            for info in page["jobs"]:
                yield Job(self._transport, info)
            if not page["next"]:
                return
            cursor = [("cursor", page["next"])]

    def devices(self) -> dict[str, Any]:
        """Return the devices of the service, with the memory that its jobs reserve.

        Returns:
            ``devices``, each with ``index``, ``name``, ``state`` ("idle", "warm" or "running"), ``memory``,
            ``reserved`` (bytes) and ``jobs``; the
            same of ``host`` and ``disk``; and ``draining``.
        """
        found: dict[str, Any] = self._transport.call("GET", "/v1/devices").json()
        return found

    def _post(self, path: str, body: object) -> Any:
        """Send a request to submit, and return the answer. A repeated request submits nothing twice."""
        return self._transport.call("POST", path, body, headers={"Idempotency-Key": str(uuid4())}).json()

    def _bodies(self, listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the descriptions of jobs as the server takes them."""
        known: list[Sequence[Mapping[str, Any]] | None] = []

        def beneath(name: str, path: str, write: bool) -> str:
            if not known and is_local(path):
                known.append(self._roots())
            return operand(name, path, known[0] if known else None, write=write)

        return [with_paths(_body(each), beneath) for each in listed]

    def _roots(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the roots of the service; None if the server is at a URL."""
        if self._transport.address.path is None:
            return None
        found: list[dict[str, Any]] = self._transport.call("GET", "/v1/roots").json()["roots"]
        return found


def _body(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a job, with paths as they are given."""
    rest = dict(given)
    verb = rest.pop("verb", "gemm")
    body: dict[str, Any] = {} if verb == "gemm" else {"verb": verb}
    for name, kind in parameters(verb).items():
        value = rest.pop(name, None)
        if value is not None or kind != OPTIONAL:
            body[name] = _operand(name, kind, value)
    for name in ("name", "priority", "held"):
        if name in rest:
            body[name] = rest.pop(name)
    if (deadline := rest.pop("deadline", None)) is not None:
        body["deadline"] = deadline.timestamp() if isinstance(deadline, datetime) else deadline
    body["needs"] = [each.id if isinstance(each, Job) else each for each in rest.pop("needs", ())]
    # No option of gemm has the meaning None. For others it may differ from the default, such as missing=None.
    nothing = {option: None for option, value in rest.items() if value is None and verb != "gemm"}
    return body | {"options": plain_options(rest) | nothing}


def _operand(name: str, kind: str, value: Any) -> Any:
    """Return an operand, or another parameter of a verb, as JSON. Raises `InputError` for an array."""
    found = None if not hasattr(value, "mapped") and hasattr(value, "dtype") else encoded(name, value)
    if kind in (COUNT, NUMBERS, REDUCTION) or isinstance(found, str | dict):
        return found
    raise InputError(
        f"{name} is a {type(value).__name__}, and a job takes paths: store the array, such as in "
        f"{name.upper()}.zarr, and pass its path"
    )


def is_local(path: object) -> bool:
    """Return whether a path is a path of this machine.

    >>> is_local("out/C.zarr"), is_local("./a:b.zarr"), is_local("data:A.zarr"), is_local("s3://x/A.zarr")
    (True, True, False, False)
    """
    return not (isinstance(path, str) and _REMOTE.match(path))


def operand(name: str, path: str, roots: Sequence[Mapping[str, Any]] | None, *, write: bool = False) -> str:
    """Return a path as the service takes it, such as ``data:dir/A.zarr``.

    Args:
        name: what is at the path, for messages.
        path: ``root:path``, or a path of this machine.
        roots: the roots of the service: each has ``name``, ``folder`` and ``writable``. None if the service
            may be on another machine.
        write: whether the path is that of a result.

    Raises:
        InputError: the path is beneath no root.
    """
    if not is_local(path):
        return path
    text = os.fsdecode(path)
    if roots is None:
        raise InputError(
            f"{name} is the local path {text}, which a server at a URL does not know: name the root and the "
            "path beneath it, such as data:dir/A.zarr"
        )
    real = os.path.realpath(text)
    found = [
        (bool(root["writable"]) and write, len(folder), str(root["name"]), folder)
        for root in roots
        if real.startswith((folder := os.path.realpath(str(root["folder"]))).rstrip("/") + "/")
    ]
    if not found:
        listed = ", ".join(f"{root['name']} ({root['folder']})" for root in roots) or "none"
        raise InputError(
            f"{name}, {text}, is beneath no folder of the service: its folders are {listed}. Move the array "
            "there, or add --root to oocgemm serve"
        )
    _, _, root_name, folder = max(found)
    return f"{root_name}:{os.path.relpath(real, folder)}"


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a verb as plain data. Options that are None are left out.

    >>> plain_options({"alpha": 1 + 2j, "trans_a": True, "chunks": (8, 8), "tile": None})
    {'alpha': '(1+2j)', 'trans_a': 'T', 'chunks': [8, 8]}

    Raises:
        InputError: a value is of a type that a job cannot have.
    """
    return {name: _plain(name, value) for name, value in options.items() if value is not None}


def _plain(name: str, value: Any) -> Any:
    if name in ("alpha", "beta"):
        return _number(name, value)
    if name in ("trans_a", "trans_b"):
        return _TRANSPOSES[value] if isinstance(value, bool) else str(value)
    if name == "out_dtype" and not isinstance(value, str):
        return str(getattr(value, "name", None) or getattr(value, "__name__", value))
    if name == "tile":
        return str(value)
    if name == "chunks":
        return [int(extent) for extent in value]
    return encoded(f"option {name}", value)


def _number(name: str, value: Any) -> float | str:
    """Return a scalar for JSON: as a text if it is complex, infinite or nan."""
    try:
        number = complex(value)
    except (TypeError, ValueError):
        raise InputError(f"option {name} must be a number, such as 1.5 or 1+2j, not {value!r}") from None
    if number.imag:
        return str(number)
    real = number.real
    return real if abs(real) < float("inf") else str(real)
