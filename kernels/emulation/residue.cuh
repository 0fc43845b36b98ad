// residue.cuh: integers modulo p in the symmetric range, -(p / 2) to (p - 1) / 2, by a multiplication.
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

// What 2^exponent and the next three powers of 256 leave, as bytes.
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

// The low byte is that of (x - 2^63) mod p. Eight bytes by residues are less than 2^18; with a multiple of p added, y and
// y + p / 2 lie in [0, 2^20), and the quotient is exact as in `residue`.
__device__ inline unsigned lifted_residue(unsigned long long x, int p) {
    const int lift = ((1 << 18) / p + 1) * p - power_residue(63, p);
    const unsigned long long inverse = ((1ull << 32) + p - 1) / p;
    const unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
    const unsigned y = dot(high, byte_residues(32, p), dot(low, byte_residues(0, p), lift));
    const unsigned quotient = static_cast<unsigned>(y * inverse + p / 2 * inverse >> 32);
    return y - quotient * p;
}
__device__ inline unsigned four_bytes(const unsigned* r) {
    return __byte_perm(__byte_perm(r[0], r[1], 0x40), __byte_perm(r[2], r[3], 0x40), 0x5410);
}
