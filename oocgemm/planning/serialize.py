"""A plan back from its plain data, as the header of a timeline keeps it."""

from collections.abc import Callable, Mapping, Set
from dataclasses import fields, replace
from math import isclose, isfinite
from typing import Any, TypeVar

from oocgemm.planning.cost.footprint import Candidate, Layouts
from oocgemm.planning.cost.machine import KernelRate, MachineModel
from oocgemm.planning.plan import Plan
from oocgemm.planning.problem import DTYPES, GemmProblem, Op
from oocgemm.planning.schedule.slots import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.candidates import Budgets
from oocgemm.planning.tiling import Layout, Tile, TileShape

T = TypeVar("T")
NEARLY = 0.05  # a version whose model is better by so much reckons the same plan otherwise


def recorded_plan(data: Mapping[str, Any], computed: Set[Tile] = frozenset()) -> Plan | None:
    """The plan whose `to_dict` this was, but for what else was considered; of one that went on with a run, the tiles
    `computed` say which were done before. None for data that do not hold all of it, or are of a version that reckons
    otherwise by more than `NEARLY`, or that no plan can have written."""
    try:
        problem = data["problem"]
        made: dict[str, Any] = {name: recorded_scalar(problem[name]) for name in ("alpha", "beta")}
        made |= {name: Op(problem[name]) for name in ("trans_a", "trans_b")}
        if not {problem[name] for name in ("a_dtype", "b_dtype", "acc_dtype", "c_dtype")} <= DTYPES.keys():
            return None
        kernels = {dtype: _typed(KernelRate, rate) for dtype, rate in data["model"]["kernels"].items()}
        known = {field.name for field in fields(MachineModel)}
        plan = Plan(
            _typed(GemmProblem, problem, **made),
            Layouts(**{name: _layout(layout) for name, layout in data["layouts"].items()}),
            _typed(Budgets, data["budget"]),
            _typed(
                MachineModel,
                {name: data["model"][name] for name in known & data["model"].keys()},
                kernels=kernels,
            ),
            recorded_candidate(data["candidate"]),
        )
        down, across = plan.grid.shape
        if before := data["tiles_done_before"]:
            if down * across - before != len(computed):
                return None
            done = {(i, j) for i in range(down) for j in range(across)} - computed
            plan = replace(plan, done=frozenset(done))
        # What is in order by itself may still not go together; the cheap question first.
        fits = list(plan.grid.shape) == data["tiles"] and plan.steps == data["steps"]
        predicted = data["predicted_seconds"]["total"]
        return plan if fits and isclose(plan.prediction.total, predicted, rel_tol=NEARLY) else None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        return None


def recorded_candidate(data: Mapping[str, Any]) -> Candidate:
    """A candidate back from its plain data, as `asdict` gives them. Raises `KeyError` or `TypeError` for others."""
    made = {"tile": _typed(TileShape, data["tile"]), "slots": _typed(Slots, data["slots"])}
    return _typed(Candidate, data, **made, traversal=_typed(Traversal, data["traversal"]))


def _layout(data: Mapping[str, Any]) -> Layout:
    pairs = {f.name: tuple(data[f.name]) for f in fields(Layout) if f.name.endswith("_chunk")}
    if any(list(map(type, pair)) != [int, int] for pair in pairs.values()):
        raise TypeError("extents of chunks are pairs of integers")
    return _typed(Layout, data, **pairs)


def _typed(kind: Callable[..., T], data: Mapping[str, Any], **made: Any) -> T:
    """A dataclass from plain data, some of it `made` already. Raises `TypeError` if a number, text or flag is none."""
    values = dict(data) | made
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass is what is called
        value = values.get(field.name)
        if field.name in made or field.name not in values:
            continue
        allowed = (int, float) if field.type is float else (field.type,)
        if type(value) not in allowed or (isinstance(value, float) and not isfinite(value)):
            raise TypeError(f"{field.name} is {value!r}")
    return kind(**values)


def recorded_scalar(value: Any) -> complex:
    """alpha or beta from plain data: a number, a text such as "nan", or a pair of parts."""
    return complex(*map(float, value)) if isinstance(value, list) else float(value)
