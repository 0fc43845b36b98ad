"""Create the errors for tile shapes and budgets that no plan can use. Their messages name the remedy."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import lcm

from oocgemm.errors import BudgetError, InputError
from oocgemm.planning.cost.footprint import Candidate, Footprint, footprint
from oocgemm.planning.integers import MAX_INT32_DEPTH
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.search.shapes import min_tile
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileShape
from oocgemm.planning.units import ceil_size, format_size, parse_size

Sizes = Mapping[str, int]  # bytes, by the option that they belong to


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
    plan that needs the least memory, if it is not that of a general product.
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
