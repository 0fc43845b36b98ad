"""The table of what each part of the planner gains."""

from tables import load, table


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
