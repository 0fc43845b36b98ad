"""Markdown tables of `bench_chunks.py`."""

from tables import load, table


def chunks() -> list[str]:
    """Return the sentences and the table of `bench_chunks.py`: how fast small chunks are read."""
    found = load("bench_chunks.json")["chunks"]
    panel, rows = 4 * found["panel"] ** 2, []
    for case in found["arrays"].values():
        costs = {way: times["cpu"] for way, times in case["seconds"].items()}
        rates = {way: f"{panel / cost / 1e9:.2f}" for way, cost in costs.items()}
        ways = [rates.get(way, "") for way in ("ours", "zarr", "loop", "codec")]
        per_second = f"{panel / costs['ours'] / case['chunk_bytes']:,.0f}"
        shrunk = f"{case['compression']:.1f}"
        rows.append([case["codec"], case["chunk"], case["data"], shrunk, *ways, per_second])
    heads = ["codec", "chunk", "data", "compression", "oocgemm", "zarr-python", "loop", "codec alone"]
    return [
        f"Reading panels of {found['panel']} x {found['panel']} float32 into slots by two threads, with a "
        "warm page cache: GB of elements per second of processor time, that is per core.",
        "The loop opens, reads, decodes and copies one chunk at a time, with numcodecs.",
        "The codec alone decodes with numcodecs from memory into the processor's cache.",
        "",
        *table([*heads, "oocgemm, chunks/s"], rows),
    ]
