"""Choose the device and the host budget of a run.

The caller passes both budgets, or one bound on all host memory, which is divided between them where the host
computes. By default, a budget is a share of the free memory.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from oocgemm.errors import BudgetError, InputError, OutOfMemoryError
from oocgemm.jobs.options import Size
from oocgemm.jobs.request import Request
from oocgemm.planning import Budgets, Plan, usable, within
from oocgemm.planning.units import format_size, parse_size
from oocgemm.system.resources import RECENT, available_for, available_memory


def budgets_of(
    backend: str,
    free: Callable[[], int] | None,
    device_memory: Size | None = None,
    host_memory: Size | None = None,
    available: int | None = None,
) -> Budgets:
    """Return the budgets in bytes. A budget that is None becomes a share of the free memory.

    On cuda, the device budget is 90% of the free device memory, the host budget half of the available RAM.
    On the host backend, they are 37.5% and 12.5% of the available RAM. `free` returns the free device memory
    or, on the host backend, the available RAM, in bytes. `available` is the available RAM; None to query it.
    If `free` is None, the device memory is unknown: without `device_memory`, `InputError` is raised.
    """
    on_host = backend == "host"
    if device_memory is not None:
        device = parse_size(device_memory)
    elif free is None:
        raise InputError(
            "planning for cuda does not query the device's memory: pass how much of it to use, such as "
            "device_memory='16GiB' (--device-memory 16GiB)"
        )
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
    free: Callable[[], int] | None,
    plan: Callable[[Budgets, float], Plan],
    devices: int = 1,
) -> Plan:
    """Return the result of `plan`, called with the budgets of a request or with their defaults.

    Args:
        request: names the budgets.
        backend: "host" or "cuda".
        free: as for `budgets_of`; with several devices, what each of them may allocate. None to plan for cuda
            without a device.
        plan: makes a plan within budgets, with a part of the usual effort of the search.
        devices: number of devices.

    Raises:
        InputError: budgets exclude each other, or one that has no default is missing.
        BudgetError: the budgets are too small.
    """
    if backend == "host" and request.budgets.memory is not None:
        if request.budgets.device_memory is not None:
            raise InputError(
                "memory bounds both budgets of the host backend together: drop device_memory, or drop memory "
                "and pass both budgets"
            )
        sizes = {"memory": parse_size(request.budgets.memory)}
    else:
        given = request.budgets.device_memory, request.budgets.all_host_memory
        budgets = budgets_of(backend, free, *given)
        memory = 0 if request.budgets.memory is None else budgets.host
        sizes = replace(budgets, memory=memory).by_option(unified=False)
    try:
        found = within(sizes, lambda budgets: plan(budgets, 1.0), devices)
    except BudgetError as error:
        limits = {} if free is None else _available(sizes, backend, free, devices)
        raise usable(error, sizes, plan, devices, limits) from error
    if found.faster is None or free is None:
        return found
    limits, faster = _available({}, backend, free, devices), found.faster.budgets
    fits = all(size <= limits[name] for name, size in faster.by_option(unified=backend == "host").items())
    return found if fits else replace(found, faster=None)


def _available(
    sizes: Mapping[str, int], backend: str, free: Callable[[], int], devices: int
) -> dict[str, int]:
    """Return how large a size of each option may be to fit in the free memory, beside those in `sizes`."""
    host = available_memory(RECENT)
    if backend != "host":
        return {"device_memory": free(), "host_memory": host, "memory": host}
    return {
        "device_memory": (host - sizes.get("host_memory", 0)) // devices,
        "host_memory": host - devices * sizes.get("device_memory", 0),
        "memory": host,
    }


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
    if request.budgets.memory is not None:
        smaller = {"memory": free * 7 // 8}
    sizes = {name: f"{max(1, share >> 20)}MiB" for name, share in smaller.items()}
    arguments = ", ".join(f"{name}='{size}'" for name, size in sizes.items())
    options = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    raise OutOfMemoryError(
        f"the plan takes {format_size(needed)} of host memory, {format_size(free)} are available: pass "
        f"{arguments} ({options})"
    )
