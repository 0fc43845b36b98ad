"""Plan products: pure decisions from shapes, budgets and rates. No I/O, no clock, no arrays."""

from oocgemm.planning.cost.clock import Prediction, divided
from oocgemm.planning.cost.coding import Division, division_of, index_bytes, with_decoding, with_encoding
from oocgemm.planning.cost.footprint import Candidate
from oocgemm.planning.cost.machine import (
    RATES,
    Calibration,
    KernelRate,
    MachineModel,
    StoreRates,
    check_fit,
    check_link,
    default_model,
    fit_line,
    fit_link,
)
from oocgemm.planning.layout import Chunked, Coding, InMemory, Layout, Layouts, Lines, Remote, Writing
from oocgemm.planning.plan import Plan, recorded_plan
from oocgemm.planning.problem import COMPUTES, DTYPES, MULTIPLIED, OPERANDS, DType, GemmProblem, Op
from oocgemm.planning.schedule.operation import Kind, Lane, Operation, Region, Slot, Slots, Tier
from oocgemm.planning.schedule.operations import Schedule
from oocgemm.planning.schedule.traversal import Traversal
from oocgemm.planning.search.planner import make_plan, resumed_plan
from oocgemm.planning.search.refusals import usable, within
from oocgemm.planning.search.shared_plans import shared_plan
from oocgemm.planning.setting import Budgets, Setting
from oocgemm.planning.tiling import TileGrid, TileSet, TileShape

__all__ = [
    "COMPUTES",
    "DTYPES",
    "MULTIPLIED",
    "OPERANDS",
    "RATES",
    "Budgets",
    "Calibration",
    "Candidate",
    "Chunked",
    "Coding",
    "DType",
    "Division",
    "GemmProblem",
    "InMemory",
    "KernelRate",
    "Kind",
    "Lane",
    "Layout",
    "Layouts",
    "Lines",
    "MachineModel",
    "Op",
    "Operation",
    "Plan",
    "Prediction",
    "Region",
    "Remote",
    "Schedule",
    "Setting",
    "Slot",
    "Slots",
    "StoreRates",
    "Tier",
    "TileGrid",
    "TileSet",
    "TileShape",
    "Traversal",
    "Writing",
    "check_fit",
    "check_link",
    "default_model",
    "divided",
    "division_of",
    "fit_line",
    "fit_link",
    "index_bytes",
    "make_plan",
    "recorded_plan",
    "resumed_plan",
    "shared_plan",
    "usable",
    "with_decoding",
    "with_encoding",
    "within",
]
