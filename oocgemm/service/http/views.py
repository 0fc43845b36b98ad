"""The JSON of requests, of answers, and of errors: problem documents of RFC 9457."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from fastapi import Response
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    StringConstraints,
    Tag,
    create_model,
)
from typing_extensions import TypedDict

from oocgemm.errors import BackendError, BudgetError, InputError
from oocgemm.jobs.support import ARRAY, COUNT, NUMBERS, OPERAND, OPTIONAL, OUT, REDUCTION, VERBS
from oocgemm.service.job_arguments import job_options, kind_of, takes_none
from oocgemm.service.job_spec import parameters
from oocgemm.service.limits import PathError
from oocgemm.service.protocol import (
    PROBLEMS,
    AccessError,
    Action,
    ConflictError,
    DatabaseError,
    KeyReusedError,
    StaleError,
    State,
    TooManyJobsError,
    UnavailableError,
    UnknownJobError,
)

Bytes = Annotated[int, Field(ge=0, lt=2**63)]
# A size as `oocgemm run` takes it, such as 1073741824 or "1GiB".
Size = Annotated[int, Field(gt=0, lt=2**63, strict=True)] | Annotated[str, StringConstraints(max_length=64)]
Number = (
    Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
    | FiniteFloat
    | Annotated[str, StringConstraints(max_length=64)]
)
Word = Annotated[str, StringConstraints(max_length=128)]
Operand = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Extent = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Tile = Annotated[list[int], Field(min_length=2, max_length=2)]
Flag = Annotated[bool, Field(strict=True)]
Priority = Annotated[int, Field(ge=-1000, le=1000, strict=True)]
Attempts = Annotated[int, Field(ge=1, le=100, strict=True)]
Deadline = Annotated[FiniteFloat, Field(ge=0)] | None


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


# A path, or what `as_matrix` or `concat` makes (`job_arguments`).
Made = Annotated[dict[str, Any], Field(max_length=1)]
Finite = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
# The JSON of options, by the kind of their values.
_VALUES: Mapping[str, Any] = {
    "flag": Flag,
    "pair": Annotated[list[Extent], Field(min_length=2, max_length=2)],
    "scalar": Number,
    "number": Number,
    "count": Finite,
    "size": Size,
    "word": Word,
    "transform": Made,
    "steps": Annotated[list[Made], Field(max_length=16)],
}
# The JSON of a verb's parameters, by what they take.
_PARAMETERS: Mapping[str, Any] = {
    OPERAND: Operand | Made,
    OPTIONAL: Operand | Made | None,
    ARRAY: Operand,
    COUNT: Finite,
    NUMBERS: FiniteFloat | Annotated[list[FiniteFloat], Field(min_length=1, max_length=1000)],
    REDUCTION: Made,
    OUT: Operand,
}


class JobBody(_Request):
    """A job to submit: a verb, its operands, and the place of its result. Times are in seconds since 1970.

    Paths are ROOT:PATH.
    """

    verb: str = "gemm"
    options: dict[str, Any] = {}
    name: Annotated[str, StringConstraints(max_length=256)] = ""
    priority: Priority = 0
    max_attempts: Attempts = 3
    deadline: Deadline = None
    needs: Annotated[list[Annotated[str, StringConstraints(max_length=26)]], Field(max_length=1000)] = []
    held: Flag = False


def _options_body(verb: str) -> type[BaseModel]:
    """Return the JSON of the options of a verb."""
    fields: dict[str, Any] = {}
    for name in job_options(verb):
        value = _VALUES[kind_of(verb, name)]
        fields[name] = (value | None if takes_none(verb, name) else value, None)
    made = create_model(f"{_title(verb)}Options", __base__=_Request, **fields)
    made.__doc__ = f"Options of `oocgemm.{verb}`. Those that are left out have its defaults."
    return made


def _job_body(verb: str) -> type[BaseModel]:
    """Return the JSON of a job of a verb."""
    own = {
        name: (_PARAMETERS[kind], None if kind == OPTIONAL else ...)
        for name, kind in parameters(verb).items()
    }
    fields: dict[str, Any] = {"verb": (Literal[verb], "gemm" if verb == "gemm" else ...), **own}
    fields["options"] = (_options_body(verb), {})
    made = create_model(f"{_title(verb)}Job", __base__=JobBody, **fields)
    made.__doc__ = f"A job of `oocgemm.{verb}`."
    return made


def _title(verb: str) -> str:
    return verb.title().replace("_", "")


def _verb_of(body: Any) -> str:
    found = body.get("verb", "gemm") if isinstance(body, dict) else getattr(body, "verb", None)
    return found if isinstance(found, str) else ""


if TYPE_CHECKING:
    AnyJob = JobBody
else:
    _BODIES = [Annotated[_job_body(verb), Tag(verb)] for verb in VERBS]
    AnyJob = Annotated[Union[tuple(_BODIES)], Discriminator(_verb_of)]  # noqa: UP007


class BatchBody(_Request):
    """Jobs to submit, all or none. A job may need an earlier one of the batch by ``#0``, ``#1`` and so on."""

    jobs: Annotated[list[AnyJob], Field(min_length=1, max_length=1000)]


class ChangeBody(TypedDict, total=False):
    """What to change in a job. Fields that are left out stay as they are."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    priority: Priority
    max_attempts: Attempts
    deadline: Deadline


class DrainBody(_Request):
    """Whether to start no more jobs."""

    draining: Flag


class LoginBody(_Request):
    """A token to sign in with."""

    token: Annotated[str, StringConstraints(max_length=256)]


class ProgressView(BaseModel):
    """How many tiles of all passes have been finished, and how many there are. `done` never falls."""

    done: int
    total: int


class ActivityView(BaseModel):
    """What a running job has done in the last seconds.

    `busy` maps each lane to the share of the time in which it was busy. `limit` says what limited the job;
    null if that is unknown.
    """

    busy: dict[str, float]
    limit: str | None


class PlanView(BaseModel):
    """What a job would occupy, and when it is predicted to start; null if that is unknown."""

    plan: dict[str, Any]
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    predicted_s: float
    predicted_start: float | None


class JobView(PlanView):
    """A job. Paths are ROOT:PATH, sizes are in bytes, times are in seconds since 1970.

    It has its operands and the place of its result, as the request had them. `warnings` say what in the data
    changes what the result means.
    """

    model_config = ConfigDict(extra="allow")

    verb: str
    id: str
    owner: str
    name: str
    state: State
    reason: str | None
    priority: int
    options: dict[str, Any]
    device: int | None
    attempt: int
    failures: int
    max_attempts: int
    not_before: float | None
    deadline: float | None
    created: float
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str | None
    result: dict[str, Any] | None
    warnings: list[str]
    needs: list[str]
    version: int
    actions: list[Action]
    progress: ProgressView | None
    activity: ActivityView | None


class JobsView(BaseModel):
    """Some jobs, and the cursor of the next page; null at the end."""

    jobs: list[JobView]
    next: str | None


class QueueView(BaseModel):
    """The jobs that have not ended, and how many jobs are in each state.

    `active` are the jobs with a process. `waiting` are the first of the other jobs: queued jobs in the order
    of their predicted starts, then held and paused jobs.
    """

    active: list[JobView]
    waiting: list[JobView]
    counts: dict[State, int]


class BatchView(BaseModel):
    """The jobs of a batch, in the order of the request."""

    jobs: list[JobView]


class TilesView(BaseModel):
    """The grid of C's tiles, and the row and column of those that have been finished in the present pass."""

    rows: int
    columns: int
    done: list[Tile]


class DeviceView(BaseModel):
    """A device: its memory, and what the running jobs reserve of it, in bytes.

    The device is warm if no job runs, and a process that has opened the device waits for the next job.
    """

    index: int
    name: str
    state: Literal["idle", "warm", "running"]
    memory: int
    reserved: int
    jobs: list[str]


class HostView(BaseModel):
    """Host memory for jobs, and what the running jobs reserve of it, in bytes."""

    memory: int
    reserved: int


class DiskView(BaseModel):
    """Disk space for results, and what the running jobs reserve of it, in bytes."""

    quota: int
    reserved: int


class DevicesView(BaseModel):
    """What the service has, and what the running jobs reserve of it."""

    devices: list[DeviceView]
    host: HostView
    disk: DiskView
    draining: bool


class UserView(BaseModel):
    """Who sends the request, and what they may do."""

    name: str
    scope: Literal["read", "submit", "admin"]


class RootView(BaseModel):
    """A folder of the service. Its path is null for users of other machines."""

    name: str
    folder: str | None
    writable: bool


class RootsView(BaseModel):
    """The folders of the service."""

    roots: list[RootView]


class DrainView(BaseModel):
    """Whether the service starts no more jobs."""

    draining: bool


class HealthView(BaseModel):
    """Whether the service works, and what does not."""

    status: Literal["ok", "unavailable"]
    problems: list[str] = []


class ProblemView(BaseModel):
    """An error, as RFC 9457 describes it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str


# The slug of a problem for each class of errors. The first class that fits decides.
_SLUGS: tuple[tuple[type[Exception], str], ...] = (
    (UnknownJobError, "not-found"),
    (StaleError, "stale"),
    (ConflictError, "conflict"),
    (KeyReusedError, "key-reused"),
    (TooManyJobsError, "too-many-jobs"),
    (AccessError, "forbidden"),
    (DatabaseError, "unavailable"),
    (UnavailableError, "unavailable"),
    (BackendError, "unavailable"),
    (PathError, "path-refused"),
    (BudgetError, "budget-too-small"),
    (InputError, "invalid-request"),
)
MEDIA_TYPE = "application/problem+json"
# For statuses after which a client may try again: the seconds until then.
RETRY_SECONDS = {429: 60, 503: 1}


def problem(
    slug: str, detail: str, status: int | None = None, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    """Return the response for a problem. `slug` is its key in `PROBLEMS`, `more` are further members."""
    kind = PROBLEMS[slug]
    status = status or kind.status
    sent = dict(headers or {})
    if status in RETRY_SECONDS:
        sent.setdefault("Retry-After", str(RETRY_SECONDS[status]))
    if status == 401:
        sent.setdefault("WWW-Authenticate", "Bearer")
    body = {"type": f"/problems/{slug}", "title": kind.title, "status": status, "detail": detail} | more
    content = json.dumps(body, ensure_ascii=True)
    return Response(content, status_code=status, headers=sent, media_type=MEDIA_TYPE)


def problem_of(error: Exception) -> Response:
    """Return the response for an error. An error that is not of this package is a defect."""
    for kind, slug in _SLUGS:
        if isinstance(error, kind):
            more: dict[str, Any] = {}
            if isinstance(error, BudgetError) and error.needed is not None:
                more["smallest"] = dict(zip(("device_memory", "host_memory"), error.needed, strict=True))
            return problem(slug, str(error), **more)
    return problem("internal", f"{type(error).__name__}: see the log of the server")
