"""Markdown tables about reading and decoding operands, from the measurements in scripts/bench/results/."""

from statistics import median

from tables import RESULTS, load, table


def hdf5() -> list[str]:
    """Return the sentences and the table of `bench_hdf5.py`: how fast datasets are read, beside h5py."""
    found = load("bench_hdf5.json")["hdf5"]
    rows = []
    for layout, case in found["layouts"].items():
        rates = {name: f"{rate / 1e9:.2f}" for name, rate in case["rates"].items()}
        size = 4 * found["panel"] ** 2
        costs = [f"{size / case['seconds'][name]['cpu'] / 1e9:.2f}" for name in ("ours", "h5py, 1 thread")]
        h5py = max(rate for name, rate in case["rates"].items() if name.startswith("h5py"))
        rows.append(
            [layout, rates["ours"], f"{h5py / 1e9:.2f}", f"{case['ratio']:.1f}", *costs, rates.get("npy", "")]
        )
    heads = ["dataset", "oocgemm", "h5py", "ratio", "oocgemm, per core", "h5py, per core", "`.npy`"]
    index, machine = found["index"], found["machine"]
    return [
        f"Reading panels of {found['panel']} x {found['panel']} float32 into slots, in GB/s of elements, on "
        f"{machine['cores']} cores with a warm page cache. Chunks have 4 MiB where nothing else is said.",
        "h5py is the faster of one and two threads with `read_direct`. Per core: divided by processor time.",
        f"Opening a dataset of {index['chunks']:,} chunks takes {index['cpu']:.2f} s of processor time.",
        "",
        *table(heads, rows),
    ]


def sparse() -> list[str]:
    """Return the sentence and the table of `bench_sparse.py host`: Gram matrices, beside scipy."""
    found, rows, shape, cores = load("bench_sparse.json"), [], "", 0
    cells = found["cuda pca 1300000x5000"]
    for key, case in found.items():
        kind, extents, density = key.split()[:3]
        if kind == "host":
            least = {way: min(values) for way, values in case["samples_seconds"].items()}
            times = [f"{least[way]:.2f}" for way in ("scipy", "memory", "h5ad")]
            ratios = [f"{case['scipy_over_ours'][way]:.1f}" for way in ("memory", "h5ad")]
            rows.append([f"{float(density):.0%}", *times, *ratios])
            shape, cores = " x ".join(extents.split("x")), case["machine"]["cores"]
    heads = ["nonzeros", "scipy, s", "`gram`, from memory, s", "`gram`, from h5ad, s", "ratio", "ratio, h5ad"]
    return [
        f"The Gram matrix of the columns of a CSR matrix of {shape} float32 on {cores} cores, the fastest of "
        "five calls by turns, beside scipy's `X.T @ X`, which uses one core. The results are equal.",
        "",
        *table(heads, rows),
        "",
        f"On an H200 with 8 GiB of device memory, {cells['components']} principal components of 1,300,000 x "
        f"5000 float32 with {cells['density']:.0%} of nonzeros, from an uncompressed zarr store in the page "
        f"cache, take {median(cells['seconds'][1:]):.1f} s, and {cells['seconds'][0]:.1f} s in the first "
        "call, which also checks the indices, and computes means. The errors of the largest singular values "
        f"are at most {max(cells['errors']):.1e} of the largest one.",
    ]


def chunks() -> list[str]:
    """Return the sentences and the table of `bench_chunks.py`: how fast small chunks are read."""
    found = load("bench_chunks.json")["chunks"]
    panel, rows = 4 * found["panel"] ** 2, []
    for case in found["arrays"].values():
        costs = {way: times["cpu"] for way, times in case["seconds"].items()}
        rates = {way: f"{panel / cost / 1e9:.2f}" for way, cost in costs.items()}
        ways = [rates.get(way, "") for way in ("ours", "zarr", "loop", "codec")]
        per_second = f"{panel / costs['ours'] / case['chunk_bytes']:,.0f}"
        ratio = f"{case['compression']:.1f}"
        rows.append([case["codec"], case["chunk"], case["data"], ratio, *ways, per_second])
    heads = ["codec", "chunk", "data", "compression", "oocgemm", "zarr-python", "loop", "codec alone"]
    return [
        f"Reading panels of {found['panel']} x {found['panel']} float32 into slots by two threads, with a "
        "warm page cache: GB of elements per second of processor time, that is per core.",
        "The loop opens, reads, decodes and copies one chunk at a time, with numcodecs.",
        "The codec alone decodes with numcodecs from memory into the processor's cache.",
        "",
        *table([*heads, "oocgemm, chunks/s"], rows),
    ]


def decoding() -> list[str]:
    """Return the sentences and the table of `bench_decoding.py`: products that the GPU decodes.

    The result is empty without measurements.
    """
    if not (RESULTS / "bench_decoding.json").exists():
        return []
    found = load("bench_decoding.json")["decoding"]
    rows = []
    for name, case in found["products"].items():
        times = {decoder: min(seconds) for decoder, seconds in case["seconds"].items()}
        gpu, ratio = "", ""
        if case["decoded"]:
            gpu, ratio = f"{times['gpu']:.3g} s", f"{times['host'] / times['gpu']:.1f}"
        rate = case["bytes"] / min(times.values()) / 1e9
        stored = f"{case['stored'] / case['bytes']:.2f}"
        rows.append([name, f"{case['k']:,}", stored, gpu, f"{times['host']:.3g} s", ratio, f"{rate:.0f}"])
    runs = max(len(case["seconds"]["host"]) for case in found["products"].values())
    return [
        f"Products on an {found['device']} and {found['machine']['cores']} cores, from the page cache: 4096 "
        "x k x 4096 float64 of six bits each, X X^T of 20480 rows of int8 genotypes, and 32768^3 float32 of "
        f"six bits each. The shortest of at most {runs} runs with each decoder.",
        "GB/s: of elements, with the faster decoder.",
        "",
        *table(["product", "k", "stored", "GPU decodes", "host decodes", "ratio", "GB/s"], rows),
    ]


def encoding() -> list[str]:
    """Return the sentences and the table of `bench_encoding.py`: products whose C the GPU compresses.

    The result is empty without measurements.
    """
    if not (RESULTS / "bench_encoding.json").exists():
        return []
    found = load("bench_encoding.json")["encoding"]
    rows = []
    for name, case in found["products"].items():
        times = {way: min(seconds) for way, seconds in case["seconds"].items()}
        shares = {way: f"{size / case['bytes']:.2f}" for way, size in case["stored"].items()}
        rows.append([name, "none", "", f"{times['none']:.3g} s", "", "", ""])
        for codec in ("blosc-lz4", "blosc-zstd", "zstd"):
            gpu, host = f"{codec}, gpu", f"{codec}, host"
            pair, ratio = [f"{times[way]:.3g} s" for way in (gpu, host)], times[host] / times[gpu]
            rows.append(["", codec, *pair, f"{ratio:.1f}", shares[gpu], shares[host]])
    shapes = "; ".join(
        f"{name}: {' x '.join(f'{n:,}' for n in case['shape'])}" for name, case in found["products"].items()
    )
    runs = min(len(seconds) for case in found["products"].values() for seconds in case["seconds"].values())
    return [
        f"Products m x k x n on an {found['device']} and {found['machine']['cores']} cores, from memory into "
        f"a new zarr array in memory (tmpfs): {shapes}. Runs of each way that count: {runs}.",
        "Stored: bytes of the chunk files per byte of C.",
        "",
        *table(
            [*("product", "compressor", "GPU", "host", "ratio"), *("stored by the GPU", "by the host")], rows
        ),
    ]
