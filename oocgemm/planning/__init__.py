"""Plan products: pure decisions from shapes, budgets and rates. No I/O, no clock, no arrays."""

from oocgemm.planning.cost.fits import check_fit, check_link, fit_line, fit_link
from oocgemm.planning.cost.footprint import Candidate, Layouts
from oocgemm.planning.cost.machine import (
    RATES,
    Calibration,
    KernelRate,
    MachineModel,
    StoreRates,
    default_model,
)
from oocgemm.planning.cost.predict import Prediction
from oocgemm.planning.plan import Plan
from oocgemm.planning.problem import COMPUTES, DTYPES, OPERANDS, DType, GemmProblem, Op
from oocgemm.planning.schedule.operations import Kind, Lane, Operation, Schedule
from oocgemm.planning.schedule.slots import Region, Slot, Slots, Tier
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.candidates import Budgets
from oocgemm.planning.search.planner import make_plan, resumed_plan
from oocgemm.planning.serialize import recorded_plan
from oocgemm.planning.tiling import Layout, TileGrid, TileShape

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
    "default_model",
    "fit_line",
    "fit_link",
    "make_plan",
    "recorded_plan",
    "resumed_plan",
]
