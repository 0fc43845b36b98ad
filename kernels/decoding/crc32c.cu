// crc32c: verifies the checksums of stored chunks (CRC-32C), which follow their bytes.
//
// Each thread computes the CRC of a part of a chunk. The CRC of a whole is the sum (exclusive or) of those of its parts,
// each times x^(8 n) modulo the polynomial, where n bytes follow the part. These sums, and the checksum, are added to
// the status of the chunk, which must be 0 before. So it is 0 in the end if the checksum matches.
//
// Source: zlib's crc32_combine.
//
// Launch: PARTS blocks of 32 threads per chunk.

#include "decoding/streams.cuh"

// The polynomial, the highest power in the lowest bit.
constexpr u32 POLYNOMIAL = 0x82F63B78, PARTS = 8, POWERS = 34;

// Multiply polynomials. The highest bit is x^0.
__device__ inline u32 times(u32 a, u32 b) {
    u32 found = 0;
    for (; a; a <<= 1) {
        if (a >> 31) found ^= b;
        b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
    }
    return found;
}

// Return x^(8 bytes). `squares[k]` is x^(2^k).
__device__ inline u32 power(u64 bytes, const u32* squares) {
    u32 found = 1u << 31;
    for (int k = 3; bytes; bytes >>= 1, ++k) {
        if (bytes & 1) found = times(squares[k], found);
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(32) crc32c(const batch_t batch) {
    __shared__ u32 tables[4][256], squares[POWERS];
    const u32 number = blockIdx.x / PARTS, lane = threadIdx.x, part = blockIdx.x % PARTS * 32 + lane;
    const chunk_t& chunk = batch.chunks[number];
    if (!chunk.stored || !chunk.checksum) return;
    for (u32 i = lane; i < 256; i += 32) {
        u32 value = i;
        for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
        tables[0][i] = value;
    }
    if (lane == 0) {
        squares[0] = 1u << 30;
        for (u32 k = 1; k < POWERS; ++k) squares[k] = times(squares[k - 1], squares[k - 1]);
    }
    __syncwarp();
    for (u32 i = lane; i < 256; i += 32) {
        u32 value = tables[0][i];
        for (int k = 1; k < 4; ++k) tables[k][i] = value = value >> 8 ^ tables[0][value & 255];
    }
    __syncwarp();
    // All parts but the first one begin at a whole word.
    const u8* source = chunk.source;
    const u64 size = chunk.stored, each = (size / (32 * PARTS) + 4) & ~3ull, lead = -(u64)source & 3;
    u64 at = part ? min(size, lead + part * each) : 0;
    const u64 end = min(size, lead + (part + 1) * each);
    u32 sum = 0;
    for (; at < end && ((u64)(source + at) & 3); ++at) sum = sum >> 8 ^ tables[0][(sum ^ source[at]) & 255];
    for (; at + 4 <= end; at += 4) {
        sum ^= *(const u32*)(source + at);
        sum = tables[3][sum & 255] ^ tables[2][sum >> 8 & 255] ^ tables[1][sum >> 16 & 255] ^ tables[0][sum >> 24];
    }
    for (; at < end; ++at) sum = sum >> 8 ^ tables[0][(sum ^ source[at]) & 255];
    sum = times(power(size - end, squares), sum);
    // A CRC begins with all bits set, and is inverted at the end.
    if (part == 0) sum ^= times(power(size, squares), 0xFFFFFFFF) ^ ~read(source + size, 4);
    if (sum) atomicXor(&batch.statuses[number], sum);
}
