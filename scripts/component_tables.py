"""Markdown tables of principal components and kernel matrices, from what `bench_pca.py` measured."""

from tables import load, seconds, table, unbroken

WHERE = {"host": "2 CPU cores", "cuda": "H100"}


def components() -> list[str]:
    """Return the table of `bench_pca.py`: other libraries' principal components beside ours."""
    rows = []
    for key, found in load("bench_pca.json").items():
        for name, samples in found["samples"].items():
            error = found["error"][name]
            rows.append(
                [
                    f"{found['what']}, {WHERE[key.partition(' ')[0]]}",
                    name,
                    seconds([x["seconds"] for x in samples]),
                    unbroken(f"{found['median_bytes'][name] / 2**20:.0f} MiB"),
                    "" if error is None else f"{error:.1e}",
                ]
            )
    heads = ["product", "with", "time", "most memory", "largest error of a singular value"]
    return table(heads, rows)
