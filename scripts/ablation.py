#!/usr/bin/env python
"""Switch off one part of the planner at a time, and compare the predicted times of the plans.

The script needs no hardware. The virtual clock predicts the times. The products are those of
`bench_grid.py`, some larger ones in files, random ones, and one that the host's copies limit. A part is worth
its lines if, without it, the geometric mean of the times is at least 1% longer, or a product takes more than
5% longer, or runs in which nothing overlaps would take 1% longer. The script fails if a part is not.

The quick form plans some of the products, and those that lose most without a part according to the results
file.
"""

import json
import math
import sys
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from plan_settings import random_settings, settings

from oocgemm.planning import Budgets, GemmProblem, InMemory, Layouts, Setting, default_model, make_plan
from oocgemm.planning.search import planner, shapes

RESULTS = Path(__file__).resolve().parent / "bench/results/ablation.json"
# A part is kept if one of these ratios, without it, exceeds its limit.
LIMITS = {"geometric_mean": 1.01, "most": 1.05, "serial": 1.01}
RANDOM = 200  # number of random products
# The quick form plans every QUICK-th product, and those LOSERS that lose most without a part.
QUICK, LOSERS = 16, 3


def nothing(*_: Any, **__: Any) -> Iterator[Any]:
    return iter(())


Patch = tuple[Any, str, Any]
# Per part of the planner: the attributes to replace to switch it off.
PARTS: dict[str, list[Patch]] = {
    "changes of the best candidate": [(planner._Search, "_improve", nothing)],
    "changes of the best estimates": [(shapes, "STARTS", 0)],
    "narrower tiles than fit": [(shapes, "WIDTHS", (1,))],
    "panels of all or half of k": [(shapes, "PARTS_OF_K", ())],
    "shapes of other extents first": [(shapes, "ALIKE", 0.0)],
    "estimates that count work": [(shapes, "SERIAL", 0.0)],
    "least work of close candidates": [(planner, "CLOSE", 0.0)],
}


def products() -> Iterator[tuple[str, Setting]]:
    """Yield the name and the inputs of the planner of each product."""
    yield from settings()
    yield from ((f"random {name}", setting) for name, setting in random_settings(RANDOM))
    yield "cuda 196608x2048x2048 float64 narrow pageable", copied_by_the_host()


def copied_by_the_host() -> Setting:
    """Return a product whose plans all take as long, because the host copies all blocks."""
    p = GemmProblem.of(196_608, 2048, 2048, *("float64",) * 4)
    layouts = Layouts(*(InMemory(zero_copy_width=100) for _ in "ABC"))
    return Setting(p, default_model("cuda", 16), layouts, Budgets(100 << 30, 50 << 30))


Times = tuple[float, float, float]


def planned(names: Container[str] | None) -> dict[str, Times]:
    """Plan products; return the seconds of each, those without overlap, and those of planning."""
    found = {}
    for name, setting in products():
        if names is not None and name not in names:
            continue
        planner._planned.cache_clear()
        planner._plan_with_advice.cache_clear()
        started = time.process_time()
        plan = make_plan(setting.problem, setting.budgets, setting.machine, setting.layouts)
        spent = time.process_time() - started
        found[name] = plan.prediction.total, plan.prediction.serial, spent
    return found


def measured(part: str, whole: dict[str, Times]) -> dict[str, Any]:
    """Plan the products without a part. Return how much longer they take."""
    with ExitStack() as stack:
        for patched in PARTS[part]:
            stack.enter_context(patch.object(*patched))
        without = planned(whole)
    ratios = {name: without[name][0] / whole[name][0] for name in whole}
    losers = sorted(ratios, key=lambda name: -ratios[name])[:LOSERS]
    best = min(ratios, key=ratios.__getitem__)
    return {
        "geometric_mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
        "serial": sum(without[name][1] / whole[name][1] for name in whole) / len(whole),
        "most": [losers[0], ratios[losers[0]]],
        "least": [best, ratios[best]],
        "losers": losers,
        "slower_by_1_percent": sum(ratio > 1.01 for ratio in ratios.values()),
        "planning_seconds": sum(spent for _, _, spent in without.values()),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--only", default="", help="Only parts whose names contain this; nothing is written.")
@click.option("--quick", is_flag=True, help="Only some products; nothing is written.")
def main(output: Path, only: str, quick: bool) -> None:
    """Plan all products with every part of the planner, and without each part."""
    kept_file = json.loads(output.read_text()) if output.exists() else {"parts": {}, "removed": {}}
    names = None
    if quick:
        names = {name for name, _ in islice(products(), 0, None, QUICK)}
        names |= {name for row in kept_file["parts"].values() for name in row["losers"]}
    whole = planned(names)
    parts, failed = dict[str, Any](), list[str]()
    for part in (part for part in PARTS if only in part):
        row = parts[part] = measured(part, whole)
        gains = row["geometric_mean"], row["most"][1], row["serial"]
        kept = any(gain > limit for gain, limit in zip(gains, LIMITS.values(), strict=True))
        failed += [] if kept else [part]
        print(
            f"{part:40} {gains[0]:.4f} serial {gains[2]:.4f} {gains[1]:.3f} {row['most'][0]} "
            f"{row['least'][1]:.3f} {row['least'][0]} {row['planning_seconds']:.2f} s"
            f"{'' if kept else ' GAINS TOO LITTLE'}",
            flush=True,
        )
    if not (only or quick):
        result = {
            "products": len(whole),
            "planning_seconds": sum(spent for _, _, spent in whole.values()),
            "parts": parts,
            "removed": kept_file["removed"],  # parts that were removed, as they were measured before that
        }
        output.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        raise SystemExit(f"parts that gain too little to be kept: {', '.join(failed)}")


if __name__ == "__main__":
    main()
