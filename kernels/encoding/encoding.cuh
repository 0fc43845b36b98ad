// What the kernels that encode a batch of chunks hand to each other.
//
// `shuffle` gathers the elements of each chunk from a strip of C, and divides them into streams. `lz4_compress` or
// `zstd_compress` compresses each stream by itself. `locate` finds the size and the place of each frame, which is what
// a chunk file contains, and `assemble` composes the frames, in host memory.
//
// A chunk of the codec zstd is a frame of zstd, with a stream per block of it. In a frame of blosc, blocks are shuffled:
// byte j of element i, of n elements, is byte j n + i of the block. Each byte of the elements is then a stream.
#pragma once

#include "decoding/streams.cuh"

// Compressors, with the numbers that blosc has for its own. ZSTD is without blosc.
constexpr u32 ZSTD = 0, BLOSC_LZ4 = 1, BLOSC_ZSTD = 4;
// The size of a stream that is stored raw, and a bit in the size of one whose bytes are all equal.
constexpr u32 AS_IT_IS = 0, EQUAL = 1u << 31;
// Frames begin at multiples of so many bytes, as direct I/O needs it, with room for a checksum behind each.
constexpr u64 PAGE = 4096, CHECKSUM = 4;

// A batch of `count` chunks, from number `first` on, of a strip of `rows` x `cols` elements of `item` bytes, which has
// `across` chunks of `height` x `width` elements per row of chunks. Elements beyond the strip are 0. A chunk
// consists of `streams` streams of `length` bytes; the last one may be shorter if blocks are not shuffled. Each stream
// has `room` bytes in `encoded`, `sequences` and `literals`, and an element in `sizes` and in `places`, which is where it
// belongs in `host`. Frames of blosc have blocks of `block` bytes. Behind the places of the streams, `places` has the
// sizes of the frames.
//
// `host` begins with the start and the size of the frame of each chunk of the strip. Frames follow, from the byte
// `frames` on. `end` is where the next frame begins.
struct encoding_t {
    const u8* strip;
    u8 *content, *encoded, *sequences, *literals, *host;
    u32* sizes;
    u64 *places, *end;
    u32 frames, count, first, rows, cols, across, height, width, item, compressor, block, streams, length, room;
};
static_assert(sizeof(encoding_t) == 128, "oocgemm.kernels.launches has the same");

// Write a number of some bytes.
__device__ inline void put(u8* to, u64 value, u32 bytes) {
    for (u32 i = 0; i < bytes; ++i) to[i] = (u8)(value >> (8 * i));
}

__device__ inline u32 chunk_bytes(const encoding_t& given) { return given.height * given.width * given.item; }

// Return the bytes of stream `number` of a chunk.
__device__ inline u32 stream_bytes(const encoding_t& given, u32 number) {
    return min(given.length, chunk_bytes(given) - number * given.length);
}

__device__ inline u64& frame_bytes(const encoding_t& given, u32 number) {
    return given.places[given.count * given.streams + number];
}
