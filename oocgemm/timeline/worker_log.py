"""The log of one attempt of a worker at a part of a distributed run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """Where the timeline log of an attempt is, and how its clock relates to that of the coordinator.

    `offset_ns` is the wall clock of the worker minus that of the coordinator, in nanoseconds, and `error_ns`
    its maximum error. `part` and `attempt` are numbers. `lost` is set if the process died or failed: of its
    work, only the tiles that it had finished count.
    """

    worker: str
    host: str
    device: str
    offset_ns: int
    error_ns: int
    path: str
    part: int
    attempt: int
    lost: bool
