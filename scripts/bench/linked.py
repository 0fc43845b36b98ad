"""Create arrays that are larger than the disk that stores them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr

CORES = len(os.sched_getaffinity(0))


def linked_zarr(
    path: Path,
    shape: tuple[int, int],
    chunk: int,
    distinct: int,
    seed: int,
    codec: Any = None,
    dtype: str = "float64",
    integers: bool = False,
) -> None:
    """Create an array whose chunk files are hard links to `distinct` files.

    Chunk (i, j) is file number (i * 7 + j * 3) % distinct. With a codec or `integers`, the elements are
    integers: they compress well, and products of them are exact. The files are synced to the disk and then
    read into the page cache, so that the first timed run reads as fast as later ones.
    """
    zarr.create_array(path, shape=shape, dtype=dtype, chunks=(chunk, chunk), compressors=codec)
    made = zarr.create_array(
        path / ".originals",
        shape=(chunk, distinct * chunk),
        dtype=dtype,
        chunks=(chunk, chunk),
        compressors=codec,
    )

    def fill(number: int) -> None:
        block = np.random.default_rng((seed, number)).standard_normal((chunk, chunk))
        made[:, number * chunk : (number + 1) * chunk] = np.round(block * 64) if codec or integers else block

    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(fill, range(distinct)))
    for i in range(shape[0] // chunk):
        (path / "c" / str(i)).mkdir(parents=True)
        for j in range(shape[1] // chunk):
            original = path / ".originals" / "c" / "0" / str((i * 7 + j * 3) % distinct)
            os.link(original, path / "c" / str(i) / str(j))
    os.sync()
    for original in (path / ".originals" / "c" / "0").iterdir():
        original.read_bytes()
