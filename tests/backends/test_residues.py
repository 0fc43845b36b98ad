"""Residues: numbers are split, summed and reconstructed exactly, and stay below half the modulus."""

from fractions import Fraction
from math import log2, prod, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.backends.host.residues import Prepared, measure_rows, split, views
from oocgemm.planning.emulation import MODULI_COUNTS, residues
from tests.support.emulated import ALL_NUMBERS, GUARD, Array, integers_of, product, room_bytes, rows
from tests.support.suite import examples


def assert_residues(residue: Array, numbers: list[list[int]], moduli: tuple[int, ...]) -> None:
    """Check that residues are those of `numbers` closest to 0, and that they are padded with zeros."""
    k = len(numbers[0])
    for plane, p in zip(residue, moduli, strict=False):
        wanted = [[(x + p // 2) % p - p // 2 for x in row] for row in numbers]
        np.testing.assert_array_equal(plane[:, :k], np.array(wanted))
        assert not plane[:, k:].any()


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_sums_over_residues_are_exact(number: int) -> None:
    how = residues(number)
    whole = prod(how.moduli)
    assert all(np.gcd(p, q) == 1 for i, p in enumerate(how.moduli) for q in how.moduli[:i])
    exact_weights = [whole // p * pow(whole // p, -1, p) for p in how.moduli]
    assert [sum(map(int, parts)) for parts in how.weights] == exact_weights
    assert sum(map(int, how.modulus)) == whole
    most = [p // 2 for p in how.moduli]
    # S is the weighted sum of residues, P the product of the moduli, and Q the integer quotient of S by P.
    # For a number below P/2, S / P is within 1/2 of Q.
    quotient = sum(c * w for c, w in zip(most, exact_weights, strict=True)) // whole + 1
    assert quotient <= 2**11
    for rank in range(3):
        parts = [*(int(parts[rank]) for parts in how.weights), int(how.modulus[rank])]
        bits = int(np.gcd.reduce(np.array([p for p in parts if p] or [1], dtype=object)))
        unit = bits & -bits
        total = sum(c * part for c, part in zip(most, parts, strict=False))
        assert total <= 2**53 * unit
        # The product is exact in float64 without a fused multiply-add.
        assert quotient * parts[-1] <= 2**53 * unit
        if rank:  # the first difference is below P, so the later ones are sums of fewer units
            assert total + quotient * parts[-1] <= 2**53 * unit
        else:
            rest = sum(c * (w - int(p[0])) for c, w, p in zip(most, exact_weights, how.weights, strict=True))
            assert whole + rest + quotient * (whole - parts[-1]) <= 2**53 * unit
            # Q is computed from the first parts of the weights only. The other parts and rounding are too
            # small to change it.
            assert rest / whole + 4 * quotient * 2.0**-53 < 0.5 - 2.0 ** (2 * how.exponent) / whole


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_numbers_are_reconstructed_from_their_residues(number: int) -> None:
    """Numbers in (-P/2, P/2), except near the ends, are reconstructed. P is the product of the moduli."""
    how = residues(number)
    most = int(2 ** (2 * how.exponent))
    rng = np.random.default_rng(number)
    small = [x for x in (0, 1, 127, 128, 255, 256, 2**31, 2**52 + 1, 2**53) if x < most]
    large = [most, most - 1, most // 3, *(int(most * x) for x in rng.random(80))]
    near = [2**e + d for e in range(20, most.bit_length() - 1) for d in (-1, 0, 1)]
    numbers = [s * x for x in [*small, *large, *near] for s in (1, -1)]
    planes = views(
        np.zeros(room_bytes(len(numbers), 1, 16, "float64"), np.uint8), len(numbers), 1, 16, "float64"
    )
    for rank, p in enumerate(how.moduli):
        planes[0].residues[rank, :, 3] = [(x + p // 2) % p - p // 2 for x in numbers]
    planes[1].residues[:, :, 3] = 1
    found = product(Prepared(number, *planes), "float64")[:, 0]
    for x, y in zip(numbers, found.tolist(), strict=True):
        assert abs(int(y) - x) <= (0 if abs(x) <= 2**53 else abs(x) / 2**52)


@settings(max_examples=examples(60), deadline=None)
@given(row=rows, far=st.integers(-1000, 960), number=st.sampled_from(MODULI_COUNTS["float64"]))
def test_products_stay_below_half_the_modulus(row: list[float], far: int, number: int) -> None:
    """The product of a row with itself is the largest that the Cauchy-Schwarz inequality allows."""
    x = np.ldexp(np.array([row]), far)
    planes, _ = views(
        np.full(room_bytes(1, 0, len(row), "float64"), GUARD, np.uint8), 1, 0, len(row), "float64"
    )
    how = residues(number)
    split(x, planes, how, measure_rows(x, planes.norms))
    numbers = integers_of(x, planes.exponents)
    assert sum(e * e for e in numbers[0]) * 2 < prod(how.moduli)
    assert max(map(abs, numbers[0])) < 2**63
    assert_residues(planes.residues, numbers, how.moduli)
    norm = sqrt(sum(Fraction(e) ** 2 for e in x[0])) if 1e-100 < np.abs(x).max() < 1e100 else 0
    if norm:  # the scale is the largest power of two that is allowed
        assert 2 ** (how.exponent - 1.001) < norm * 2.0 ** int(planes.exponents[0])


@pytest.mark.parametrize("number", ALL_NUMBERS)
@pytest.mark.parametrize("k", [16, 1000, 1 << 17])
def test_norms_at_exponent_steps_stay_below_half_the_modulus(k: int, number: int) -> None:
    how = residues(number)
    for factor, exponent in ((1 - 2.0**-30, 0), (1 + 2.0**-30, -1), (1.001, -1), (1.003, -1)):
        value = 2**how.exponent / sqrt(k) * factor
        x = np.full((1, k), value)
        planes, _ = views(np.zeros(room_bytes(1, 0, k, "float64"), np.uint8), 1, 0, k, "float64")
        split(x, planes, how, measure_rows(x, planes.norms))
        assert planes.exponents[0] == exponent
        integer = round(Fraction(value) * Fraction(2) ** exponent)
        assert 2 * k * integer**2 < prod(how.moduli)


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_the_largest_residues_at_depth_are_summed_exactly(number: int) -> None:
    """The sums are larger than the integers that float32 represents exactly."""
    how, k = residues(number), 5999
    whole = prod(how.moduli)
    planes = views(np.zeros(room_bytes(1, 1, k, "float64"), np.uint8), 1, 1, k, "float64")
    for plane in planes:
        plane.residues[:number, :, :k] = np.array([(p - 1) // 2 for p in how.moduli])[:, None, None]
    wanted = sum(k * ((p - 1) // 2) ** 2 * (whole // p) * pow(whole // p, -1, p) for p in how.moduli) % whole
    wanted -= whole if wanted > whole // 2 else 0
    assert abs(int(product(Prepared(number, *planes), "float64")[0, 0]) - wanted) <= abs(wanted) // 2**52


@pytest.mark.parametrize("number", ALL_NUMBERS)
def test_the_largest_exponent_is_used(number: int) -> None:
    """A larger exponent would break the bound on products, and the exponent used is not much smaller."""
    how = residues(number)
    assert 2 * how.exponent + 1 == pytest.approx(log2(prod(how.moduli)), abs=0.003)
    assert 2 * how.exponent + 1 < log2(prod(how.moduli)) - 2.0**-10
    assert how.exponent < 62.5  # so that a rounded element fits into int64
