// residue.cuh: residues modulo p in the symmetric range, -(p / 2) to (p - 1) / 2, computed by multiplication.
#pragma once

// ceil(2^38 / p), below 2^31 for p > 128.
constexpr int reciprocal(int p) { return static_cast<int>(((1ll << 38) + p - 1) / p); }

// 2^exponent mod p, in the symmetric range.
constexpr int power_residue(int exponent, int p) {
    const int r = static_cast<int>((1ull << exponent) % static_cast<unsigned>(p));
    return r > (p - 1) / 2 ? r - p : r;
}

// y mod p for |y| < 2^29. A multiple of p is added first, so that y is in [0, 2^30). The reciprocal, scaled
// by 2^38, is too large by e / p with e < p; the quotient is exact as long as y e < 2^38.
__device__ inline int residue(int y, int p, int inverse) {
    const int half = p / 2, lift = ((1 << 29) / p + (p < 256)) * p;
    const int lifted = y + lift + half;
    return lifted - (__mulhi(lifted, inverse) >> 6) * p - half;
}

// The residues of 2^exponent and of its products with 256, 256^2 and 256^3, packed into four bytes.
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

// A number whose low byte is that of (x - 2^63) mod p. The dot product of eight bytes and residues is less
// than 2^18 in size. A multiple of p is added, so that y and y + p / 2 are in [0, 2^20), and the quotient is
// exact as in `residue`.
__device__ inline unsigned lifted_residue(unsigned long long x, int p) {
    const int lift = ((1 << 18) / p + 1) * p - power_residue(63, p);
    const unsigned long long inverse = ((1ull << 32) + p - 1) / p;
    const unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
    const unsigned y = dot(high, byte_residues(32, p), dot(low, byte_residues(0, p), lift));
    const unsigned quotient = static_cast<unsigned>(y * inverse + p / 2 * inverse >> 32);
    return y - quotient * p;
}
// Packs the low bytes of four numbers.
__device__ inline unsigned four_bytes(const unsigned* r) {
    return __byte_perm(__byte_perm(r[0], r[1], 0x40), __byte_perm(r[2], r[3], 0x40), 0x5410);
}
