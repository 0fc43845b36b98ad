"""Tables on plans: what each part of the planner gains, and what measured rates change."""

from statistics import geometric_mean

from grid_cases import IN_MEMORY
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
    """Return the table of products that were planned with measured and learned rates, by their sources."""
    found = load("bench_rates.json")["cuda rates"]
    groups: dict[str, list[dict[str, float]]] = {
        "pinned arrays": [],
        "pageable arrays": [],
        "files": [],
        "all": [],
    }
    for name, one in found["cases"].items():
        source = name.split()[2]
        groups[f"{source} arrays" if source in IN_MEMORY else "files"].append(one["ratios"])
        groups["all"].append(one["ratios"])
    rows = []
    for group, ratios in groups.items():
        kinds = ([one[kind] for one in ratios] for kind in ("measured", "learned", "both"))
        cells = (unbroken(f"{geometric_mean(some):.3f} ({min(some):.3f}-{max(some):.3f})") for some in kinds)
        rows.append([f"{len(ratios)}: {group}", *cells])
    return table(["products", "calibrated", "learned", "both"], rows)
