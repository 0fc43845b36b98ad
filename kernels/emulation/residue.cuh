// residue.cuh: integers modulo p, computed by multiplication instead of division. Results are in the
// symmetric range -(p / 2) to (p - 1) / 2, unless stated otherwise.
#pragma once

// The reciprocal of p, scaled by 2^38 and rounded up. It fits an int, since all moduli p exceed 128.
constexpr int reciprocal(int p) { return static_cast<int>(((1ll << 38) + p - 1) / p); }

// Returns 2^exponent mod p, in the symmetric range.
constexpr int power_residue(int exponent, int p) {
    const int r = static_cast<int>((1ull << exponent) % static_cast<unsigned>(p));
    return r > (p - 1) / 2 ? r - p : r;
}

// Returns y mod p for |y| < 2^29. `inverse` is reciprocal(p). First, a multiple of p is added to y, which
// makes it nonnegative and below 2^30. Then y / p is computed as y * inverse / 2^38, rounded down. This is
// exact: inverse exceeds 2^38 / p by less than 1, so the quotient before rounding is too large by less than
// 2^30 / 2^38 = 1 / 256, which is at most 1 / p.
__device__ inline int residue(int y, int p, int inverse) {
    const int half = p / 2, lift = ((1 << 29) / p + (p < 256)) * p;
    const int lifted = y + lift + half;
    return lifted - (__mulhi(lifted, inverse) >> 6) * p - half;
}

// Returns the residues of 2^exponent times 1, 256, 256^2 and 256^3, one per byte. Their dot product with the
// four bytes of a number x is congruent to x 2^exponent.
constexpr int byte_residues(int exponent, int p) {
    unsigned four = 0;
    for (int i = 0; i < 4; ++i) four |= (power_residue(exponent + 8 * i, p) & 0xffu) << 8 * i;
    return static_cast<int>(four);
}
__device__ inline int dot(unsigned bytes, int factors, int sum) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(bytes), "r"(factors), "r"(sum));
    return d;
}

// Returns a number whose low byte is the residue (x - 2^63) mod p; the other bits have no meaning. x is
// reduced byte by byte: y is the dot product of its eight bytes with the residues of the powers of 256, plus
// a multiple of p that makes it nonnegative. The dot product is less than 2^18 in size, so y + p / 2 is less
// than 2^20, and the quotient by p is exact for the same reason as in `residue`.
__device__ inline unsigned lifted_residue(unsigned long long x, int p) {
    const int lift = ((1 << 18) / p + 1) * p - power_residue(63, p);
    const unsigned long long inverse = ((1ull << 32) + p - 1) / p;
    const unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
    const unsigned y = dot(high, byte_residues(32, p), dot(low, byte_residues(0, p), lift));
    const unsigned quotient = static_cast<unsigned>(y * inverse + p / 2 * inverse >> 32);
    return y - quotient * p;
}
// Packs the low bytes of four numbers into one word, the first number lowest.
__device__ inline unsigned four_bytes(const unsigned* r) {
    return __byte_perm(__byte_perm(r[0], r[1], 0x40), __byte_perm(r[2], r[3], 0x40), 0x5410);
}
