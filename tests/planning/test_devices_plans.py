"""Plans for several devices that need none: budgets that suffice for all, and slots after a resumed run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocgemm
from oocgemm import BudgetError
from oocgemm.planning import Budgets, resumed_plan
from oocgemm.planning.schedule.dealing import arrangement


def test_budgets_that_are_too_small_name_what_suffices_for_all_devices(tmp_path: Path) -> None:
    a = tmp_path / "a.npy"
    np.save(a, np.ones((400, 400)))
    c = tmp_path / "C"
    given: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "devices": "0,1,2,3"}
    with pytest.raises(BudgetError, match="smallest plan for 4 devices") as caught:
        oocgemm.plan(a, a, c, device_memory="90MiB", host_memory="64KiB", **given)
    assert caught.value.least is not None
    budgets = Budgets(90 << 20, caught.value.least)
    planned = oocgemm.plan(a, a, c, device_memory=budgets.device, host_memory=budgets.host, **given)
    assert planned.footprint.host_total <= budgets.host


def test_more_devices_get_more_host_slots_when_a_run_is_resumed() -> None:
    a, b = np.ones((130, 90)), np.ones((90, 110))
    plan = oocgemm.plan(a, b, backend="cuda", device_memory="200MiB", kernel="cublas", tile="20x20x10")
    slots = replace(plan.candidate.slots, host_a=1, host_b=1, host_c=1)
    given = plan.problem, plan.budgets, plan.machine, plan.layouts
    resumed = resumed_plan(*given, replace(plan.candidate, slots=slots), frozenset(), 4)
    down, across = arrangement(4, plan.problem, resumed.grid)
    assert (resumed.slots.host_a, resumed.slots.host_b) == (3 * down, 3 * across)
    assert (resumed.devices, resumed.slots.a) == (4, slots.a)
