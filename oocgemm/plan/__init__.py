"""Plans: pure decisions. Standard library only; no I/O, no clock, no array library."""

from oocgemm.plan.cost import Candidate, Layouts, Prediction
from oocgemm.plan.machine import (
    Calibration,
    KernelRate,
    MachineModel,
    StoreRates,
    default_model,
    fit_line,
)
from oocgemm.plan.planner import Budgets, Plan, make_plan
from oocgemm.plan.problem import DTYPES, DType, GemmProblem, Op
from oocgemm.plan.schedule import Kind, Lane, Operation, Region, Schedule, Slot, Slots, Tier
from oocgemm.plan.tiling import Layout, TileGrid, TileShape

__all__ = [
    "DTYPES",
    "Budgets",
    "Calibration",
    "Candidate",
    "DType",
    "GemmProblem",
    "KernelRate",
    "Kind",
    "Lane",
    "Layout",
    "Layouts",
    "MachineModel",
    "Op",
    "Operation",
    "Plan",
    "Prediction",
    "Region",
    "Schedule",
    "Slot",
    "Slots",
    "StoreRates",
    "Tier",
    "TileGrid",
    "TileShape",
    "default_model",
    "fit_line",
    "make_plan",
]
