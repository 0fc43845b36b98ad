"""Tables on plans: what each part of the planner gains, and what measured rates change."""

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
    """Return the table of products that were planned with measured and learned rates."""
    found = load("bench_rates.json")["cuda rates"]
    rows = [
        [unbroken(name), *(f"{one['ratios'][kind]:.3f}" for kind in ("measured", "learned", "both"))]
        for name, one in found["cases"].items()
    ]
    means = (f"{found[kind]['geometric_mean']:.3f}" for kind in ("measured", "learned", "both"))
    return table(["product", "calibrated", "learned", "both"], [*rows, ["geometric mean", *means]])
