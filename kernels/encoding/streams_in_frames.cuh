// How streams are stored in frames: of zstd, or of c-blosc 1.21 (README_CHUNK_FORMAT.rst).
#pragma once

#include "encoding/encoding.cuh"

// Bytes of the header of a blosc frame, of the header of a zstd frame, and of that of a block of it.
constexpr u32 HEADER = 16, ZSTD_HEADER = 10, BLOCK_HEADER = 3;

// Return the bytes before the first stream in a frame.
__device__ inline u32 header_bytes(const encoding_t& given) {
    return given.compressor == ZSTD ? ZSTD_HEADER : HEADER + 4 * (chunk_bytes(given) / given.block);
}

// Return the bytes of the compressed stream of a blosc frame; those of its content if it is stored as it is.
__device__ inline u32 compressed_bytes(const encoding_t& given, u32 size) {
    const u32 whole = (size & ~EQUAL) + (given.compressor == BLOSC_ZSTD ? ZSTD_HEADER + BLOCK_HEADER : 0);
    return size != AS_IT_IS && whole < given.length ? whole : given.length;
}

// Return the bytes of a stream in a frame, with what precedes it.
__device__ inline u32 stored_bytes(const encoding_t& given, u32 chunk, u32 stream) {
    const u32 size = given.sizes[chunk * given.streams + stream];
    if (given.compressor != ZSTD) return 4 + compressed_bytes(given, size);
    return BLOCK_HEADER + (size == AS_IT_IS ? stream_bytes(given, stream) : size & ~EQUAL);
}
