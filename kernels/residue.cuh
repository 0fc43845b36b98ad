// residue.cuh: an int32 modulo p in the symmetric range, -(p / 2) to (p - 1) / 2, by a multiplication.
#pragma once

// ceil(2^38 / p), below 2^31 for p > 128.
constexpr int reciprocal(int p) { return static_cast<int>(((1ll << 38) + p - 1) / p); }

// What a power of two leaves modulo p, in the symmetric range.
constexpr int power_residue(int exponent, int p) {
    const int r = static_cast<int>((1ull << exponent) % static_cast<unsigned>(p));
    return r > (p - 1) / 2 ? r - p : r;
}

// y mod p for |y| < 2^29. With a multiple of p added, y lies in [0, 2^30); the reciprocal is too large by e < p of 2^38, so
// that the quotient is exact as long as y e < 2^38.
__device__ inline int residue(int y, int p, int inverse) {
    const int half = p / 2, lift = ((1 << 29) / p + (p < 256)) * p;
    const int lifted = y + lift + half;
    return lifted - (__mulhi(lifted, inverse) >> 6) * p - half;
}
