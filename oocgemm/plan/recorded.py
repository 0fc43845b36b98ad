"""A plan back from its plain data, as the header of a timeline keeps it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from oocgemm.plan.candidates import Budgets
from oocgemm.plan.cost import Candidate, Layouts
from oocgemm.plan.machine import KernelRate, MachineModel
from oocgemm.plan.planner import Plan
from oocgemm.plan.problem import DTYPES, GemmProblem, Op
from oocgemm.plan.slots import Slots
from oocgemm.plan.tiling import Layout, TileShape
from oocgemm.plan.traversal import Traversal


def recorded_plan(data: Mapping[str, Any]) -> Plan | None:
    """The plan whose `to_dict` this was, but for what else was considered. None for data that do not hold all of it,
    such as those of another version."""
    try:
        problem = dict(data["problem"])
        problem |= {name: recorded_scalar(problem[name]) for name in ("alpha", "beta")}
        problem |= {name: Op(problem[name]) for name in ("trans_a", "trans_b")}
        machine = dict(data["model"])
        machine["kernels"] = {dtype: KernelRate(**rate) for dtype, rate in machine["kernels"].items()}
        if not {problem[name] for name in ("a_dtype", "b_dtype", "acc_dtype", "c_dtype")} <= DTYPES.keys():
            return None
        layouts = {name: _layout(layout) for name, layout in data["layouts"].items()}
        candidate, budgets = recorded_candidate(data["candidate"]), Budgets(**data["budget"])
        return Plan(GemmProblem(**problem), Layouts(**layouts), budgets, MachineModel(**machine), candidate)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def recorded_candidate(data: Mapping[str, Any]) -> Candidate:
    """A candidate back from its plain data, as `asdict` gives them. Raises `KeyError` or `TypeError` for others."""
    made = {"tile": TileShape(**data["tile"]), "slots": Slots(**data["slots"])}
    return Candidate(**dict(data) | made | {"traversal": Traversal(**data["traversal"])})


def _layout(data: Mapping[str, Any]) -> Layout:
    pairs = {f.name for f in fields(Layout) if f.name.endswith("_chunk")}
    values: dict[str, Any] = {name: tuple(value) if name in pairs else value for name, value in data.items()}
    return Layout(**values)


def recorded_scalar(value: Any) -> complex:
    """alpha or beta from plain data: a number, a text such as "nan", or a pair of parts."""
    return complex(*map(float, value)) if isinstance(value, list) else float(value)
