"""Genotypes, and .bed files that are written without the code under test."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# The two bits of each genotype (the number of copies of A1; -1 is missing), as PLINK's format states them.
BITS = {2: 0b00, -1: 0b01, 1: 0b10, 0: 0b11}


def genotypes(rng: np.random.Generator, individuals: int, variants: int, missing: float = 0.05) -> Array:
    """Return random genotypes of int8, some of which are missing."""
    x = rng.binomial(2, rng.uniform(0.1, 0.9, variants), (individuals, variants)).astype(np.int8)
    x[rng.random(x.shape) < missing] = -1
    return x


def bed_bytes(x: Array) -> bytes:
    """Return the content of the .bed file of genotypes, in the order of variants."""
    people, variants = x.shape
    codes = np.zeros((variants, -(-people // 4) * 4), np.uint8)
    for genotype, bits in BITS.items():
        codes[:, :people][genotype == x.T] = bits
    four = codes.reshape(variants, codes.shape[1] // 4, 4) << np.array([0, 2, 4, 6], np.uint8)
    packed: Array = np.bitwise_or.reduce(four, axis=2)
    return b"\x6c\x1b\x01" + packed.tobytes()


def write_bed(path: Path, x: Array) -> Path:
    """Write a .bed file with its .fam and .bim files. Return its path."""
    path.write_bytes(bed_bytes(x))
    people, variants = x.shape
    path.with_suffix(".fam").write_text("".join(f"F{i // 2} I{i} 0 0 0 -9\n" for i in range(people)))
    path.with_suffix(".bim").write_text("".join(f"1\trs{j}\t0\t{j + 1}\tA\tG\n" for j in range(variants)))
    return path


def reference(x: Array, method: str) -> tuple[Array, int]:
    """Return the genetic relationship matrix, and how many variants were left out."""
    known: Any = np.ma.masked_equal(x, -1).astype(float)
    p = np.asarray(known.mean(axis=0).filled(0)) / 2
    used = (p > 0) & (p < 1)
    z = np.asarray((known - 2 * p).filled(0))[:, used]
    variance = (2 * p * (1 - p))[used]
    if method == "gcta":
        z /= np.sqrt(variance)
        return z @ z.T / used.sum(), int((~used).sum())
    return z @ z.T / variance.sum(), int((~used).sum())
