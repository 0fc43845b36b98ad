"""Refuse tile shapes and budgets that no plan can use, and name sizes of memory with which a run is fast.

The options that bound the memory of a run are ``device_memory``, ``host_memory`` and ``memory``. If the
memory of the device is host memory, ``memory`` bounds both budgets together. Otherwise it bounds the host
budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import lcm, sqrt

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning.cost.bound import required_bytes
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint
from oocgemm.planning.emulation import MAX_INT32_DEPTH
from oocgemm.planning.plan import Plan
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.search.shapes import min_tile
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileShape
from oocgemm.planning.units import ceil_size, format_size, parse_size

Sizes = Mapping[str, int]  # bytes, by the option that they belong to
# With the sizes that an error names, a product takes at most this many times as long as with plenty of
# memory.
MAX_SLOWER = 2.0
# The sizes that an error names are at most this many times as large as the least such sizes.
CLOSE = 1.03
# Budgets that no plan needs: PLENTY times the memory of the smallest plan, so that many threads can decode
# chunks, plus twice the minimum of bytes that cross all links; at most LARGEST, which is still a valid size.
PLENTY, LARGEST = 64, 1 << 62


def check_tile(setting: Setting, tile: TileShape) -> None:
    """Raise `InputError` for a tile shape that a product cannot use."""
    problem = setting.problem
    if min(tile.m, tile.n, tile.k) < 1:
        raise InputError(f"tile {tile} has an extent below 1: write MxNxK, such as 4096x4096x512")
    if problem.cover.square and tile.m != tile.n:
        raise InputError(
            f"tile {tile} is not square, as the tiles of a Gram matrix must be: write MxMxK, such as "
            f"{tile.m}x{tile.m}x{tile.k}"
        )
    if problem.b.one_tile and (tile.m, tile.n) != (problem.m, problem.n):
        raise InputError(
            f"tile {tile} divides C, but chained products need one tile: write {problem.m}x{problem.n}xK"
        )
    if problem.exact and min(tile.k, problem.depth) > MAX_INT32_DEPTH:
        raise InputError(
            f"tile {tile} would sum {tile.k} int8 products in int32, which can hold sums of "
            f"{MAX_INT32_DEPTH}: make k at most {MAX_INT32_DEPTH}"
        )
    chunk = setting.layouts.c.writing.chunk
    if problem.cover.square:
        chunk = (lcm(*chunk), lcm(*chunk))
    for name, extent, nominal, unit in (
        ("m", problem.m, tile.m, chunk[0]),
        ("n", problem.n, tile.n, chunk[1]),
    ):
        if nominal < extent and nominal % unit:
            square = problem.cover.square
            names, of_c = ("m and n", setting.layouts.c.writing.chunk) if square else (name, chunk)
            multiple = f"a multiple of {unit}, or " if unit < extent else ""
            raise InputError(
                f"tile {tile}: {name} = {nominal} would make two tiles write to one chunk of C, which has "
                f"{of_c[0]} x {of_c[1]} elements: make {names} {multiple}at least {extent}, or give C other "
                "chunks"
            )


def budget_error(setting: Setting, tile: TileShape | None, smallest: Candidate | None = None) -> BudgetError:
    """Create the error for budgets that are too small for every plan.

    With `tile`, it is for budgets that are too small for every plan with that tile shape. `smallest` is the
    plan that needs the least memory. None means the smallest plan of a general product.
    """
    problem, layouts, budgets = setting.problem, setting.layouts, setting.budgets
    unified = setting.machine.unified
    shape = tile or min_tile(setting)
    strip = min(setting.c_chunks(shape)[0], shape.m)
    host = 0 if unified else 1
    slots = Slots(
        host_a=host,
        host_b=host,
        host_c=host,
        finish=problem.finish_slots,
        strip=strip,
        planes=2 if problem.prepares else 0,
        unified=unified,
    )
    needed = sufficing(setting, smallest or Candidate(shape, slots))
    if tile:
        return too_small(setting, needed, f"the plan of tile {tile}", "a smaller tile")
    remedies = []
    if needed.host_total > budgets.host:
        remedies += [f"rechunk {x}" for x, on in (("A", layouts.a), ("B", layouts.b)) if on.decode_bytes]
    if max(layouts.c.writing.chunk) > 16 or (needed.host_total > budgets.host and layouts.c.writing.encodes):
        remedies.append("give C smaller chunks")
    return too_small(setting, needed, "the smallest plan", " or ".join(remedies))


def sufficing(setting: Setting, candidate: Candidate) -> Footprint:
    """Return the footprint of a candidate within budgets in which it fits.

    The ring grows with the host budget. So it may be larger within the budget that this footprint needs.
    """
    needed = footprint(setting, candidate)
    while True:
        exact, rounded = needed.host_total, parse_size(ceil_size(needed.host_total))
        budgets = (Budgets(setting.budgets.device, max(setting.budgets.host, x)) for x in (exact, rounded))
        tried = [footprint(replace(setting, budgets=within), candidate) for within in budgets]
        larger = max(tried, key=lambda used: used.host_total)
        if larger.host_total <= needed.host_total:
            return needed
        needed = larger


def too_small(setting: Setting, footprint: Footprint, what: str, otherwise: str = "") -> BudgetError:
    """Create the error for budgets below `footprint`. The message names budgets that suffice.

    `what` names the plan that does not fit. `otherwise` names remedies other than larger budgets, if any.
    """
    unified, device, host = setting.machine.unified, footprint.device_total, footprint.host_total
    total = host + (setting.devices * device if unified else 0)
    given = setting.budgets.by_option(unified=unified)
    needed = Budgets(device, host, total if setting.budgets.memory else 0).by_option(unified=unified)
    short = {name: needed[name] for name in given if needed[name] > given[name]}
    # If only one of the two parts of one bound is too small, the bound is divided in another way.
    short = short or {name: needed[name] for name in given if name == "memory"}
    fault = " and ".join(f"{name.replace('_', ' ')} {format_size(given[name])}" for name in short)
    fault += f" cannot hold {what} ({' and '.join(f'{size} bytes' for size in short.values())}"
    if short.keys() - {"device_memory"}:
        scratch = footprint.host["scratch"]
        fault += f", {format_size(scratch)} of it to decode or encode chunks" * bool(scratch)
    return _refusal(fault + ")", otherwise, short, (device, host), short)


def _refusal(fault: str, otherwise: str, least: Sizes, needed: tuple[int, int], named: Sizes) -> BudgetError:
    arguments = ", ".join(f"{name}='{ceil_size(size)}'" for name, size in named.items())
    options = " ".join(f"--{name.replace('_', '-')} {ceil_size(size)}" for name, size in named.items())
    return BudgetError(
        f"{fault}: pass {arguments} ({options}){otherwise and f', or {otherwise}'}",
        least=next(iter(least.values())),
        needed=needed,
        named=named,
        naming=partial(_refusal, fault, otherwise, least, needed),
    )


def within(sizes: Sizes, plan: Callable[[Budgets], Plan], devices: int = 1) -> Plan:
    """Return the result of `plan`, called with the budgets that follow from some options.

    Args:
        sizes: bytes by option: ``device_memory`` and either ``host_memory`` or ``memory``, or ``memory``
            alone. In the last case, ``memory`` is divided. The device budgets get three quarters, in equal
            parts, and the host budget one quarter. If no plan fits, the smallest plan gets what it needs, and
            the budgets share the rest in this way.
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
        available: the maximum bytes for an option, where that is known, unless the smallest plan needs more.
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
