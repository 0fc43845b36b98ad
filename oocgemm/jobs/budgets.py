"""Choose the device and the host budget of a run.

The caller passes both budgets, or one bound on all memory, which is divided between them. By default, a
budget is a share of the free memory.
"""

from collections import deque
from collections.abc import Callable

from oocgemm.errors import BudgetError, InputError, OutOfMemoryError
from oocgemm.jobs.options import Size
from oocgemm.jobs.request import Request
from oocgemm.planning import Budgets, Plan
from oocgemm.planning.units import ceil_size, format_size, parse_size
from oocgemm.system.memory import RECENT, available_for, available_memory


def budgets_of(
    backend: str,
    free: Callable[[], int],
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    available: int | None = None,
) -> Budgets:
    """Return the budgets in bytes. A budget that is None becomes a share of the free memory.

    On cuda, the device budget is 90% of the free device memory, the host budget half of the available RAM.
    On the host backend, they are 37.5% and 12.5% of the available RAM. `free` returns the free device memory
    or, on the host backend, the available RAM, in bytes. `available` is the available RAM; None to query it.
    """
    on_host = backend == "host"
    if device_memory is not None:
        device = parse_size(device_memory)
    else:
        device = _steady(free() * 3 // 8 if on_host else free() * 9 // 10)
    if host_memory is not None:
        return Budgets(device, parse_size(host_memory))
    available = available_memory(RECENT) if available is None else available
    return Budgets(device, _steady(available // (8 if on_host else 2)))


# The latest default budgets in bytes, of devices and of hosts, the latest first. Runs on several devices may
# take turns.
_latest: deque[int] = deque(maxlen=16)


def _steady(size: int) -> int:
    """Return one of the latest default budgets that is at most 4% smaller than `size`, and not larger.

    If there is none, round `size` down to 6 significant bits, by 3% at most. Free memory differs a little
    from call to call. If the budgets do not, the later calls find their plans in the cache.
    """
    for latest in tuple(_latest):  # several threads may call this
        if 0.96 * size <= latest <= size:
            return latest
    excess = max(0, size.bit_length() - 6)
    rounded = size >> excess << excess
    _latest.appendleft(rounded)
    return rounded


def within_budgets(
    request: Request,
    backend: str,
    free: Callable[[], int],
    plan: Callable[[Budgets], Plan],
    devices: int = 1,
) -> Plan:
    """Return the result of `plan`, called with the budgets of a request or with their defaults.

    `free` is as for `budgets_of`; with several devices, what each of them may allocate.

    Raises `BudgetError` if the budgets are too small.
    """
    if request.memory is not None:
        if backend != "host":
            raise InputError(
                "memory bounds the RAM of the host backend, but this run uses cuda: pass device_memory and "
                "host_memory instead (--device-memory, --host-memory)"
            )
        return _within(parse_size(request.memory), plan, devices)
    return plan(budgets_of(backend, free, request.device_memory, request.host_memory))


def _within(memory: int, plan: Callable[[Budgets], Plan], devices: int) -> Plan:
    """Split one memory bound, in bytes, into two budgets, and plan within them.

    The device budgets get three quarters, in equal parts, and the host budget one quarter. If no plan fits,
    the smallest plan gets what it needs, and they share the rest in this way.
    """
    budgets = Budgets((memory - memory // 4) // devices, memory // 4)
    try:
        return plan(budgets)
    except BudgetError as error:
        if error.needed is None:
            raise
        device, host = error.needed
        least = devices * device + host
        if least > memory:
            raise BudgetError(
                f"memory {format_size(memory)} cannot hold the smallest plan ({least} bytes): pass "
                f"memory='{ceil_size(least)}' (--memory {ceil_size(least)})",
                least=least,
                needed=error.needed,
            ) from error
        host += (memory - least) // 4
    return plan(Budgets((memory - host) // devices, host))


def check_memory(plan: Plan, request: Request) -> None:
    """Raise `OutOfMemoryError`, with budgets that fit, if a plan needs more than the available memory.

    Without this check the system might grant the memory, and kill a process when the run writes to the pages.
    """
    on_devices = plan.devices * plan.footprint.device_total
    needed = plan.footprint.host_total + (on_devices if plan.machine.unified else 0)
    free = available_for(needed)
    if needed <= free:
        return
    given = {"device": plan.budgets.device, "host": plan.budgets.host}
    # Suggest 7/8 of the available memory: other programs may allocate some before the next call.
    shares = (
        {"device": free * 3 // 4 // plan.devices, "host": free // 8}
        if plan.machine.unified
        else {"host": free * 7 // 8}
    )
    smaller = {f"{tier}_memory": share for tier, share in shares.items() if given[tier] > share}
    if request.memory is not None:
        smaller = {"memory": free * 7 // 8}
    sizes = {name: f"{max(1, share >> 20)}MiB" for name, share in smaller.items()}
    arguments = ", ".join(f"{name}='{size}'" for name, size in sizes.items())
    options = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    raise OutOfMemoryError(
        f"the plan takes {format_size(needed)} of host memory, {format_size(free)} are available: pass "
        f"{arguments} ({options})"
    )
