"""What the server and its clients agree on: states of jobs, actions on them, errors. Standard library only.

- `State`, `Action` and `Reason`, which state follows which, and what users may request.
- `ServiceError` and its kinds.
- `PROBLEMS`: how errors travel, as problem documents of RFC 9457.
"""

from collections.abc import Mapping
from enum import StrEnum

from oocgemm.errors import BudgetError, InputError, OocGemmError
from oocgemm.values import dataclass

# Number of characters of an id, and minimum number of its last characters that lists show.
ID_LENGTH, SHORT = 26, 6


class State(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Action(StrEnum):
    """What a user requests for a job."""

    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"
    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"


class Reason(StrEnum):
    """Why a queued job waits."""

    PRIORITY = "priority"
    DEVICE_MEMORY = "device-memory"
    HOST_MEMORY = "host-memory"
    DISK = "disk"
    DEPENDENCY = "dependency"
    RETRY_AT = "retry-at"
    DRAINING = "draining"


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
# The process of a job in one of these states may be alive.
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.PAUSING, State.CANCELLING})

FOLLOWING: Mapping[State, frozenset[State]] = {
    # A queued job fails if its deadline passes.
    State.QUEUED: frozenset({State.STARTING, State.HELD, State.CANCELLED, State.FAILED}),
    State.HELD: frozenset({State.QUEUED, State.CANCELLED}),
    # If the process dies, the job is queued and started again.
    State.STARTING: frozenset(
        {State.RUNNING, State.SUCCEEDED, State.FAILED, State.QUEUED, State.PAUSING, State.CANCELLING}
    ),
    State.RUNNING: frozenset({State.SUCCEEDED, State.FAILED, State.QUEUED, State.PAUSING, State.CANCELLING}),
    # The process may end in any way before it notices the request.
    State.PAUSING: frozenset({State.PAUSED, State.SUCCEEDED, State.FAILED, State.CANCELLING}),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset({State.QUEUED}),
    State.CANCELLED: frozenset({State.QUEUED}),
}

_REQUESTS: Mapping[Action, Mapping[State, State]] = {
    Action.CANCEL: {
        **dict.fromkeys((State.QUEUED, State.HELD, State.PAUSED), State.CANCELLED),
        **dict.fromkeys((State.STARTING, State.RUNNING, State.PAUSING), State.CANCELLING),
        **{state: state for state in (State.CANCELLING, State.CANCELLED)},
    },
    Action.HOLD: {State.QUEUED: State.HELD, State.HELD: State.HELD},
    Action.RELEASE: {State.HELD: State.QUEUED, State.QUEUED: State.QUEUED},
    Action.PAUSE: {
        **dict.fromkeys((State.STARTING, State.RUNNING), State.PAUSING),
        **{state: state for state in (State.PAUSING, State.PAUSED)},
    },
    Action.RESUME: {State.PAUSED: State.QUEUED, State.QUEUED: State.QUEUED},
    Action.RETRY: {
        **dict.fromkeys((State.FAILED, State.CANCELLED), State.QUEUED),
        State.QUEUED: State.QUEUED,
    },
}


def requested(action: Action, state: State) -> State | None:
    """Return the state after an action; the same state if nothing is left to do; None if impossible."""
    return _REQUESTS[action].get(state)


def possible(state: State) -> tuple[Action, ...]:
    """Return the actions that change a job in a state."""
    return tuple(action for action in Action if requested(action, state) not in (None, state))


class ServiceError(OocGemmError):
    """A request to the service failed."""


class UnknownJobError(ServiceError):
    """There is no job with this id."""


class ConflictError(ServiceError):
    """The state of a job does not allow the request, or another live job writes the same C."""


class StaleError(ConflictError):
    """A job has changed since it was read."""


class KeyReusedError(ServiceError):
    """An Idempotency-Key was used before, with another request."""


class DatabaseError(ServiceError):
    """The database cannot be read or written."""


class UnavailableError(ServiceError):
    """No server answers, or the server cannot answer now."""


class AccessError(ServiceError):
    """The server does not allow this user, this token or this host name to do that."""


class TooManyJobsError(ServiceError):
    """The user has as many jobs as the service allows."""


class WaitTimeoutError(ServiceError, TimeoutError):
    """A job has not ended in the given time."""


@dataclass(frozen=True)
class Problem:
    """A type of problem: the HTTP status and title of its documents, and the error that a client raises."""

    status: int
    title: str
    error: type[OocGemmError] = ServiceError


# By slug, the last part of a problem's type.
PROBLEMS: Mapping[str, Problem] = {
    "invalid-request": Problem(422, "The request is invalid", InputError),
    "not-found": Problem(404, "There is no such thing", UnknownJobError),
    "path-refused": Problem(422, "A path cannot be used", InputError),
    "budget-too-small": Problem(422, "A memory budget is too small", BudgetError),
    "conflict": Problem(409, "The state does not allow the request", ConflictError),
    "stale": Problem(412, "The job has changed since it was read", StaleError),
    "key-reused": Problem(422, "The Idempotency-Key was used with another request", KeyReusedError),
    "unauthorized": Problem(401, "The request has no valid token", AccessError),
    "forbidden": Problem(403, "The user may not do this", AccessError),
    "host-refused": Problem(403, "The Host header is not allowed", AccessError),
    "cross-site": Problem(403, "The request comes from another site", AccessError),
    "too-large": Problem(413, "The request is too large", InputError),
    "too-slow": Problem(408, "The request comes too slowly", UnavailableError),
    "too-many-jobs": Problem(429, "The user has too many jobs", TooManyJobsError),
    "unavailable": Problem(503, "The service cannot answer now", UnavailableError),
    "internal": Problem(500, "The service has a defect"),
}
