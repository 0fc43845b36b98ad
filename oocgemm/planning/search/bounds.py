"""From the options that bound the memory of a run to its budgets, and to larger sizes with which it is fast.

The options are ``device_memory``, ``host_memory`` and ``memory``. If the memory of the device is host memory,
``memory`` bounds both budgets together. Otherwise it bounds the host budget.
"""

from collections.abc import Callable
from math import sqrt

from oocgemm.errors import BudgetError
from oocgemm.planning.cost.footprint import required_bytes
from oocgemm.planning.plan import Plan
from oocgemm.planning.search.refusals import Sizes
from oocgemm.planning.setting import Budgets
from oocgemm.planning.units import ceil_size, parse_size

# With the sizes that an error names, a product takes at most this many times as long as with plenty of them.
MAX_SLOWER = 2.0
# The sizes that an error names are at most this many times as large as the least such sizes.
CLOSE = 1.03
# Plenty: this many times what the smallest plan needs, so that many threads can decode chunks, and besides
# twice the bytes that cross all links at least; but not more than can be written as a size.
PLENTY, LARGEST = 64, 1 << 62


def within(sizes: Sizes, plan: Callable[[Budgets], Plan], devices: int = 1) -> Plan:
    """Return the result of `plan`, called with the budgets that follow from some options.

    Args:
        sizes: bytes by option: ``device_memory`` and either ``host_memory`` or ``memory``, or ``memory``
            alone. Alone, it is divided. The device budgets get three quarters, in equal parts, and the host
            budget one quarter. If no plan fits, the smallest plan gets what it needs, and they share the rest
            in this way.
        plan: makes a plan within budgets.
        devices: number of devices.

    Raises:
        BudgetError: no plan fits.
    """
    memory = sizes.get("memory", 0)
    if "device_memory" in sizes:
        return plan(Budgets(sizes["device_memory"], memory or sizes["host_memory"], memory))
    try:
        return plan(Budgets((memory - memory // 4) // devices, memory // 4, memory))
    except BudgetError as error:
        if error.needed is None:
            raise
        device, host = error.needed
        least = devices * device + host
        if least > memory:
            raise
    host += (memory - least) // 4
    return plan(Budgets((memory - host) // devices, host, memory))


def usable(
    error: BudgetError,
    sizes: Sizes,
    plan: Callable[[Budgets, float], Plan],
    devices: int = 1,
    available: Sizes | None = None,
) -> BudgetError:
    """Return an error like `error` that names sizes with which the product is not slow.

    The smallest plan may decode or read the same chunks thousands of times. So the message names the least
    sizes with which the product takes at most `MAX_SLOWER` times as long as with plenty of memory.

    Args:
        error: what `plan` raised.
        sizes: bytes by option, as for `within`.
        plan: makes a plan within budgets, with a part of the usual effort of the search.
        devices: number of devices.
        available: the most bytes that an option may name, where that is known, unless the smallest plan needs
            more.
    """
    if error.naming is None or error.needed is None:
        return error
    device, host = error.needed
    needed = {"device_memory": device, "host_memory": host, "memory": host}
    if "device_memory" not in sizes:
        needed["memory"] += devices * device
    least = {name: _rounded(needed[name]) for name in sizes if needed[name] > sizes[name]}

    def planned(named: Sizes, effort: float = 0.0) -> Plan | None:
        try:
            return within({**sizes, **named}, lambda budgets: plan(budgets, effort), devices)
        except BudgetError:
            return None

    smallest = planned(least)
    if smallest is None:
        return error
    whole = 2 * sum(required_bytes(smallest.problem).values())
    named = {
        name: max(size, _rounded(min(PLENTY * size + whole, (available or {}).get(name, LARGEST))))
        for name, size in least.items()
    }
    fast = planned(named, 1.0)
    if fast is None:
        return error
    for number, name in enumerate(least, 1):
        limit = fast.prediction.total * MAX_SLOWER ** (number / len(least))

        def suffices(size: int, name: str = name, limit: float = limit) -> bool:
            found = planned({**named, name: size})
            return found is not None and found.prediction.total <= limit

        named[name] = _least(least[name], named[name], suffices)
    return error.naming(named)


def _least(low: int, high: int, suffices: Callable[[int], bool]) -> int:
    """Return a size that suffices, near the least one from `low` to `high`. `high` suffices."""
    if suffices(low):
        return low
    while high > CLOSE * low:
        middle = _rounded(int(sqrt(low * high)))
        if middle in (low, high):
            break
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _rounded(size: int) -> int:
    """Return the bytes of a size as a message writes it."""
    return parse_size(ceil_size(size))
