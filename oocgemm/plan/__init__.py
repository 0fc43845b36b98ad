"""Plans: pure decisions. Standard library only; no I/O, no clock, no array library."""

from oocgemm.plan.candidates import Budgets
from oocgemm.plan.cost import Candidate, Layouts
from oocgemm.plan.fits import check_fit, check_link, fit_line, fit_link
from oocgemm.plan.machine import (
    RATES,
    Calibration,
    KernelRate,
    MachineModel,
    StoreRates,
    default_model,
)
from oocgemm.plan.plan import Plan
from oocgemm.plan.planner import continued, make_plan
from oocgemm.plan.predict import Prediction
from oocgemm.plan.problem import COMPUTES, DTYPES, OPERANDS, DType, GemmProblem, Op
from oocgemm.plan.recorded import recorded_plan
from oocgemm.plan.schedule import Kind, Lane, Operation, Schedule
from oocgemm.plan.slots import Region, Slot, Slots, Tier
from oocgemm.plan.tiling import Layout, TileGrid, TileShape
from oocgemm.plan.traversal import Traversal

__all__ = [
    "COMPUTES",
    "DTYPES",
    "OPERANDS",
    "RATES",
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
    "Traversal",
    "check_fit",
    "check_link",
    "continued",
    "default_model",
    "fit_line",
    "fit_link",
    "make_plan",
    "recorded_plan",
]
