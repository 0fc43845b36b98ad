"""Rebuild a plan from the plain data that `Plan.to_dict` returned, as stored in a timeline's header."""

from collections.abc import Callable, Mapping, Set
from dataclasses import Field, fields, replace
from math import isclose, isfinite
from typing import Any, TypeVar

from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.machine import KernelRate, MachineModel
from oocgemm.planning.epilogue import Step
from oocgemm.planning.layout import KINDS, Coding, Codings, Layout, Layouts, Writing
from oocgemm.planning.plan import Plan
from oocgemm.planning.problem import DTYPES, GemmProblem, Op
from oocgemm.planning.schedule.operation import Slots
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.setting import Budgets
from oocgemm.planning.tile_set import TileSet
from oocgemm.planning.tiling import Tile, TileShape

T = TypeVar("T")
# Maximum relative difference between the recorded predicted time and the time that this version predicts. A
# larger difference means that another cost model made the plan.
TOLERANCE = 0.05


def recorded_plan(data: Mapping[str, Any], computed: Set[Tile] = frozenset()) -> Plan | None:
    """Rebuild the plan that `Plan.to_dict` wrote, without the candidates that the planner rejected.

    `computed` are the tiles that this run computed. If it resumed an earlier run, the earlier run must have
    completed all other tiles.

    Returns None if the data are incomplete or inconsistent, or if this version predicts a time that differs
    from the recorded one by more than `TOLERANCE`.
    """
    try:
        kernels = {dtype: _typed(KernelRate, rate) for dtype, rate in data["model"]["kernels"].items()}
        plan = Plan(
            recorded_problem(data["problem"]),
            recorded_layouts(data["layouts"]),
            _typed(Budgets, data["budget"]),
            _typed(MachineModel, data["model"], kernels=kernels),
            recorded_candidate(data["candidate"]),
            devices=max(1, int(data["devices"])),
        )
        if before := data["tiles_done_before"]:
            if plan.grid.count - before != len(computed):
                return None
            done = set(TileSet.of(plan.grid)) - computed
            plan = replace(plan, done=frozenset(done))
        # Fields that are valid by themselves may still contradict one another.
        consistent = list(plan.grid.shape) == data["tiles"] and plan.steps == data["steps"]
        predicted = data["predicted_seconds"]["total"]
        return plan if consistent and isclose(plan.prediction.total, predicted, rel_tol=TOLERANCE) else None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        return None


def recorded_problem(data: Mapping[str, Any]) -> GemmProblem:
    """Rebuild a problem from `Plan.to_dict`. Raises `KeyError`, `TypeError` or `ValueError`."""
    made: dict[str, Any] = {name: recorded_scalar(data[name]) for name in ("alpha", "beta")}
    made |= {name: Op(data[name]) for name in ("trans_a", "trans_b")}
    made["epilogue"] = tuple(_typed(Step, step) for step in data["epilogue"])
    for name in ("a_dtype", "b_dtype", "acc_dtype", "c_dtype"):
        DTYPES[data[name]]
    problem = GemmProblem.recorded(dict(data) | made)
    for part in (problem, problem.a, problem.b, problem.arithmetic, problem.sink):
        _check_types(part)
    return problem


def recorded_candidate(data: Mapping[str, Any]) -> Candidate:
    """Rebuild a candidate from the output of `asdict`. Raises `KeyError` or `TypeError` for other data."""
    made = {"tile": _typed(TileShape, data["tile"]), "slots": _typed(Slots, data["slots"])}
    return _typed(Candidate, data, **made, traversal=_typed(Traversal, data["traversal"]))


def recorded_layouts(data: Mapping[str, Any]) -> Layouts:
    """Rebuild layouts from the output of `Layouts.to_dict`. Raises `KeyError` or `TypeError` if not."""
    codings = {name: _typed(Coding, of) if of else None for name, of in data["codings"].items()}
    layouts = (_layout(data[name]) for name in "abc")
    return Layouts(*layouts, codings=Codings(**codings))


def _layout(data: Mapping[str, Any]) -> Layout:
    given = {name: value for name, value in data.items() if name != "kind"}
    writing = _typed(Writing, data["writing"], chunk=_pair(data["writing"]["chunk"]))
    pairs = {name: _pair(value) for name, value in given.items() if name.endswith("_chunk")}
    return _typed(KINDS[data["kind"]], given, **pairs, writing=writing)


def _pair(value: Any) -> tuple[int, int]:
    if list(map(type, value)) != [int, int]:
        raise TypeError(f"chunk extents must be pairs of integers, not {value}")
    return value[0], value[1]


def _check_types(value: Any) -> None:
    """Raise `TypeError` if a number or text among the fields of a dataclass is of another type."""
    for field in fields(value):
        if field.type in (int, float, bool, str):
            _check_field(field, getattr(value, field.name))


def _check_field(field: Field[Any], value: Any) -> None:
    allowed = (int, float) if field.type is float else (field.type,)
    if type(value) not in allowed or (isinstance(value, float) and not isfinite(value)):
        raise TypeError(f"{field.name} must be a finite {field.type}, not {value!r}")


def _typed(kind: Callable[..., T], data: Mapping[str, Any], **made: Any) -> T:
    """Build a dataclass of type `kind`.

    A field gets its value from `made`, or from `data` if it is not in `made`. Values in `made` are already
    converted and are not checked. Raises `TypeError` if a value from `data` has another type than its field,
    or is not finite.
    """
    values = dict(data) | made
    for field in fields(kind):  # type: ignore[arg-type]  # `kind` is always a dataclass
        value = values.get(field.name)
        if field.name not in made and field.name in values:
            _check_field(field, value)
    return kind(**values)


def recorded_scalar(value: Any) -> complex:
    """Parse alpha or beta: a number, a text such as "nan", or a list [real, imaginary] of these."""
    return complex(*map(float, value)) if isinstance(value, list) else float(value)
