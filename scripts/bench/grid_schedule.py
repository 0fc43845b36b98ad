"""The predicted time of the best plan of a product, if its kernel and all links run at their ceilings.

A block cannot be multiplied before it has arrived, nor downloaded before it is complete. So even a perfect
run takes longer than its slowest resource: at its start and at its end, only some resources are busy.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from grid_cases import COLD, IN_MEMORY, PAGEABLE, Case
from plan_settings import grid_setting

from oocgemm.planning import KernelRate, MachineModel, Setting, make_plan

LATENCY = 1e-6  # seconds of each operation, so that it is not worth while to use ever smaller blocks


def scheduled(case: Case, rates: dict[str, Any], compute: float | None) -> float | None:
    """Return the seconds of the best plan on the virtual clock; None if the time in core is not known.

    `rates` and `compute` are as for `grid_cases.bounds`. Besides, each operation takes `LATENCY`.
    """
    if compute is None:
        return None
    setting = grid_setting(case, "cuda")
    plan = make_plan(setting.problem, setting.budgets, model(case, rates, compute, setting), setting.layouts)
    return plan.prediction.total


def model(case: Case, rates: dict[str, Any], compute: float, setting: Setting) -> MachineModel:
    """Return a machine whose links and kernel run at the measured ceilings."""
    default, name = setting.machine, setting.problem.rate
    kernel = default.kernels[name]
    whole = default.multiply_seconds(name, setting.problem.flops, case.m, case.n, case.k)
    read = rates["disk_read"] if case.source in COLD else rates.get("page_h2d", rates["h2d"])
    pageable = case.source == PAGEABLE
    return replace(
        default,
        kernels={**default.kernels, name: KernelRate(kernel.peak * whole / compute, kernel.half_depth)},
        h2d=rates["staged_h2d" if pageable else "h2d"],
        d2h=rates["staged_d2h" if pageable else "d2h"],
        memory=rates["staged_h2d_both"] + rates["staged_d2h_both"],
        read=read,
        read_scattered=read,
        write=rates["d2h"] if case.source in IN_MEMORY else rates["disk_write"],
        copy_latency=LATENCY,
        step_latency=LATENCY,
        write_latency=LATENCY,
        segment=LATENCY,
        issue=LATENCY,
    )
