"""Markdown tables of the measurements of Gram matrices in scripts/results/."""

from tables import load, seconds, table, unbroken


def grams() -> list[str]:
    """Return the table of `bench_gram.py`: Gram matrices beside the same products by `gemm`."""
    rows = []
    for found in load("bench_gram.json").values():
        gram, gemm = (seconds(found["samples_seconds"][name]) for name in ("gram", "gemm"))
        device = unbroken(found["backend"]["device"])
        rows.append([found["what"], device, gram, gemm, f"{found['ratio']:.2f}"])
    return table(["product", "on", "T of gram", "T of gemm", "relative to gemm"], rows)
