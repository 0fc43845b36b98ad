"""The backend of the workers, as far as planning needs it in a process that may not have their device."""

from collections.abc import Collection, Sequence

from oocgemm.backends import Backend, Session, open_backend
from oocgemm.distributed.survey import Found
from oocgemm.kernels.registry import check_plan
from oocgemm.planning import GemmProblem, Plan


def planning_engine(found: Collection[Found]) -> Backend:
    """Return the backend to plan with. It has the properties of the workers' devices."""
    first = next(iter(found))
    if first.backend == "host":
        return open_backend("host")
    return _Described(first, min(one.free for one in found))


class _Described:
    """A backend in other processes: it answers what planning asks, and cannot run a plan."""

    def __init__(self, found: Found, free: int) -> None:
        self.name = found.backend
        self._found = found
        self._free = free

    def device_count(self) -> int:
        return 1

    def free_memory(self) -> int:
        return self._free

    def multiprocessors(self) -> int:
        return self._found.multiprocessors

    def is_pinned(self, address: int, size: int) -> bool:
        return False

    def link_limit(self) -> float | None:
        return None

    def describe(self) -> dict[str, str]:
        return dict(self._found.described)

    def check(self, plan: Plan, kernel: str) -> None:
        check_plan(kernel, plan)

    def arithmetic(self, problem: GemmProblem, kernel: str) -> str:
        return self._found.kernel

    def open(self, plan: Plan, kernel: str, beside: Sequence[Session] = ()) -> Session:
        raise NotImplementedError("a plan of a distributed run is run by its workers")
