"""Compare the plans of two versions of the planner, priced by the clock of the second one.

usage: compare_plans.py save FILE [SEED]     in the first version: writes how each product is planned
       compare_plans.py against FILE [SEED]  in the second one: prices both plans of each product

SEED is that of the random products, by default the one of the ablation.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from plan_settings import random_settings, settings

from oocgemm.planning import Candidate, Setting, Slots, TileShape, Traversal, make_plan
from oocgemm.planning.cost.clock import Prediction, predict

RANDOM = 200


def products(seed: int) -> Iterator[tuple[str, Setting]]:
    """Yield the products of the ablation and random ones."""
    yield from ((f"grid {name}", setting) for name, setting in settings())
    yield from ((f"random {name}", setting) for name, setting in random_settings(RANDOM, seed))


def candidate(data: dict[str, Any]) -> Candidate:
    """Return the candidate that `asdict` made `data` of."""
    slots, order = Slots(**data["slots"]), Traversal(**data["traversal"])
    return Candidate(TileShape(**data["tile"]), slots, order, data["io_threads"], data["ends"])


def priced(setting: Setting, one: Candidate) -> Prediction:
    """Predict a candidate as the planner does."""
    return predict(setting.enqueued, one)


def main(how: str, path: Path, seed: int = 5) -> None:
    """Write the plans of this version, or compare them with those in a file."""
    found = dict[str, Any]()
    for name, setting in products(seed):
        started = time.process_time()
        plan = make_plan(setting.problem, setting.budgets, setting.machine, setting.layouts)
        found[name] = {"candidate": asdict(plan.candidate), "seconds": time.process_time() - started}
    if how == "save":
        path.write_text(json.dumps(found))
        return
    before = json.loads(path.read_text())
    for group in ("grid", "random"):
        rows = []
        for name, setting in products(seed):
            if name.startswith(group) and name in before:
                old, new = (priced(setting, candidate(x[name]["candidate"])) for x in (before, found))
                rows.append((new.total / old.total, new.serial / old.serial if old.serial else 1.0, name))
        times = [sorted(x[name]["seconds"] * 1e3 for *_, name in rows) for x in (before, found)]
        average = math.exp(sum(math.log(ratio) for ratio, *_ in rows) / len(rows))
        print(f"{group}, {len(rows)} products: geometric mean of predicted times {average:.4f}, largest")
        print("\n".join(f"  {ratio:.3f} {name}" for ratio, _, name in sorted(rows, reverse=True)[:5]))
        print(f"  without overlap, mean {mean(serial for _, serial, _ in rows):.4f}")
        for which, spent in zip(("before", "now"), times, strict=True):
            middle = f"median {median(spent):.1f}, mean {mean(spent):.1f}"
            print(f"  planning {which}: {middle}, max {max(spent):.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
