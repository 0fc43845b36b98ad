"""The states of a job, which states follow which, and what users may request."""

from collections.abc import Mapping
from enum import StrEnum


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
    # A process that dies is started again: its job is queued.
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
    """Return the state that follows when a user requests an action; None if the action is impossible.

    It is the same state if the action has been done already: every action is idempotent.
    """
    return _REQUESTS[action].get(state)


def possible(state: State) -> tuple[Action, ...]:
    """Return the actions that change a job in a state."""
    return tuple(action for action in Action if requested(action, state) not in (None, state))
