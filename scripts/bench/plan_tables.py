"""Tables on plans: what each part of the planner gains, and what rates of the machine change."""

from statistics import geometric_mean, median

from tables import load, table, unbroken


def ablation() -> list[str]:
    """Return the table of the parts of the planner, with the predicted times without each of them."""
    result = load("ablation.json")
    rows = []
    for kept, parts in (("yes", result["parts"]), ("no", result["removed"])):
        for part, row in sorted(parts.items(), key=lambda item: -item[1]["geometric_mean"]):
            cells = f"{row['geometric_mean']:.4f}", f"{row['most'][1]:.3f}", f"{row['least'][1]:.3f}"
            rows.append([part, *cells, kept])
    heads = ["part", "time without it, geometric mean", "most", "least", "kept"]
    return table(heads, rows)


def rates() -> list[str]:
    """Return the table of products that were planned with each kind of rates."""
    found = load("bench_rates.json")["cuda rates"]["cases"].values()
    rows = []
    for kind, name in (("assumed", "defaults"), ("probed", "probe"), ("measured", "calibration")):
        times = [one["ratios"][kind] for one in found]
        errors = [one["predicted"][kind] / median(one["samples"][kind]) for one in found]
        cells = (
            unbroken(f"{geometric_mean(some):.2f} ({min(some):.2f}-{max(some):.2f})")
            for some in (times, errors)
        )
        rows.append([name, *cells])
    return table(["rates", "time / time with defaults", "predicted / measured time"], rows)
