"""Markdown tables of the measurements of Gram matrices in scripts/bench/results/."""

from tables import load, seconds, table, unbroken


def grams() -> list[str]:
    """Return the table of `bench_gram.py`: Gram matrices beside the same products by `gemm`."""
    rows = []
    for found in load("bench_gram.json").values():
        gram, gemm = (seconds(found["samples_seconds"][name]) for name in ("gram", "gemm"))
        device = unbroken(found["backend"]["device"])
        rows.append([found["what"], device, gram, gemm, f"{found['ratio']:.2f}"])
    return table(["product", "on", "T of gram", "T of gemm", "relative to gemm"], rows)


def transformed() -> list[str]:
    """Return the table of `bench_transform.py`: genotypes that are transformed on load, beside plain ones."""
    what = {
        "int8": "complete int8, no transform",
        "float16": "complete float16, no transform",
        "centred": "complete int8, centred: exact",
        "imputed": "int8, 1% missing, replaced by 0: exact",
        "transform": "int8, 1% missing, replaced by means, centred, scaled, cast to float16",
    }
    rows = []
    for found in load("bench_transform.json").values():
        taken = found["seconds"]
        extents = f"{found['people']} x {found['places']}"
        for name, text in what.items():
            ratios = (f"{found[name] / found[other]:.2f}" for other in ("int8", "float16"))
            rows.append([f"{extents} {text}", unbroken(found["device"]), seconds(taken[name]), *ratios])
    return table(["X", "on", "T", "relative to int8", "to float16"], rows)
