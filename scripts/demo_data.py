"""Create the matrices of the demo, and check its product with only NumPy and zarr."""

import sys
from pathlib import Path

import numpy as np
import zarr


def make(work: Path, size: int) -> None:
    """Create A and B of normal random numbers."""
    rng = np.random.default_rng(2010)
    for name in ("A", "B"):
        array = zarr.create_array(
            work / f"{name}.zarr", shape=(size, size), chunks=(1000, 1000), dtype="float64", compressors=None
        )
        for row in range(0, size, 1000):
            array[row : row + 1000] = rng.standard_normal((min(1000, size - row), size))


def check(work: Path) -> None:
    """Check that |dC| <= k eps (|A| |B|) for every element, where dC is the error of C. NaN never passes."""
    a, b, c = (zarr.open_array(work / f"{name}.zarr", mode="r") for name in "ABC")
    k = a.shape[1]
    right = np.asarray(b[:])
    worst = 0.0
    for row in range(0, a.shape[0], 1000):
        left = np.asarray(a[row : row + 1000])
        bound = k * np.finfo(np.float64).eps * (np.abs(left) @ np.abs(right))
        ratio = np.abs(np.asarray(c[row : row + 1000]) - left @ right) / bound
        if not (ratio <= 1).all():
            sys.exit(f"rows from {row} on are wrong: error {np.nanmax(ratio)} times its bound")
        worst = max(worst, float(ratio.max()))
    print(f"all {c.shape[0] * c.shape[1]} elements are right; the largest error is {worst:.2g} of its bound")


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "make":
        make(folder, int(sys.argv[3]))
    else:
        check(folder)
