// place: composes the elements of compressed chunks from their decoded streams, in a panel of A or B.
//
// A chunk is divided into blocks of `block` bytes; the last one may be shorter. A block consists of `split`
// streams of equal length, but the last one, if it is shorter, of one. (`oocgemm.stores.codecs` finds the
// streams.) With n elements of ITEM bytes in a block, and each index counted from 0, byte j of element i is
//
//   PLAIN  byte i ITEM + j of the block
//   BYTES  byte j n + i
//   BITS   bit b of it is bit i % 8 of byte (8 j + b) n / 8 + i / 8; PLAIN if n is not a multiple of 8
//
// The kernel is bound by memory. Each thread composes one element at a time, so that the threads of a warp read
// neighbouring bytes.
//
// Macros:
//   OOC_ITEM  bytes of an element: 1, 2, 4, 8 or 16
// Launch: blocks of 256 threads. blockIdx.y selects the chunk. The thread blocks along x share its elements.

#include "decoding/streams.cuh"

constexpr int ITEM = OOC_ITEM;
typedef u8 byte_t;

struct alignas(ITEM) element_t {
    byte_t bytes[ITEM];
};

extern "C" __global__ void __launch_bounds__(256) place(
    const byte_t* const* __restrict__ streams, const chunk_t* __restrict__ chunks, long long pitch,
    element_t* __restrict__ panel) {
    const chunk_t chunk = chunks[blockIdx.y];
    // Chunks have less than 2^31 bytes.
    const unsigned cols = chunk.cols, count = chunk.rows * cols, block = chunk.block, step = gridDim.x * 256;
    for (unsigned e = blockIdx.x * 256 + threadIdx.x; e < count; e += step) {
        const unsigned down = e / cols, right = e - down * cols;
        const unsigned start = ((chunk.row + down) * chunk.width + chunk.col + right) * ITEM;
        const unsigned number = start / block, i = (start - number * block) / ITEM;
        const unsigned left = chunk.size - number * block, content = left < block ? left : block;
        const unsigned split = left < block ? 1 : chunk.split, n = content / ITEM;
        const byte_t* const* parts = streams + chunk.first + number * chunk.split;
        element_t found;
        if (chunk.order == BYTES || (chunk.order == BITS && n % 8 == 0)) {
#pragma unroll
            for (int j = 0; j < ITEM; ++j) {
                const byte_t* plane = split > 1 ? parts[j] : parts[0] + j * n;
                unsigned value = 0;
                if (chunk.order == BYTES) {
                    value = plane[i];
                } else {
#pragma unroll
                    for (int b = 0; b < 8; ++b) value |= (plane[b * (n / 8) + i / 8] >> (i % 8) & 1) << b;
                }
                found.bytes[j] = value;
            }
        } else {
            const unsigned each = content / split, part = i * ITEM / each;
#pragma unroll
            for (int j = 0; j < ITEM; ++j) {
                const unsigned at = i * ITEM + j, of = split > 1 ? at / each : part;
                found.bytes[j] = parts[of][at - of * each];
            }
        }
        panel[chunk.target + down * pitch + right] = found;
    }
}
