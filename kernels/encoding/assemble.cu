// assemble: composes the frames of a batch of their streams.
//
// A frame of blosc that would be longer than its elements is stored without compression, and not shuffled.
//
// Launch: a block of 32 threads per stream.

#include "decoding/copies.cuh"
#include "encoding/streams_in_frames.cuh"

constexpr u32 VERSION = 2, STREAM_VERSION = 1, SHUFFLED = 1, STORED_RAW = 2;
// A frame of zstd, whose size has four bytes. No match reaches back further than a window of 64 KiB.
constexpr u32 MAGIC = 0xFD2FB528, SIZE_OF_FOUR_BYTES = 0x80, WINDOW = 0x30;

__device__ inline void put_zstd_header(u8* to, u32 content) {
    put(to, MAGIC, 4);
    to[4] = SIZE_OF_FOUR_BYTES;
    to[5] = WINDOW;
    put(to + 6, content, 4);
}

__device__ inline void put_block_header(u8* to, u32 size, u32 content, bool last) {
    const u32 kind = size == AS_IT_IS ? RAW : size & EQUAL ? RLE : COMPRESSED;
    put(to, last | kind << 1 | (kind == COMPRESSED ? size : content) << 3, BLOCK_HEADER);
}

__device__ inline void put_blosc_header(const encoding_t& given, u8* to, u64 size, bool raw) {
    const u32 shuffled = given.item > 1 && !raw ? SHUFFLED : 0;
    to[0] = VERSION;
    to[1] = STREAM_VERSION;
    to[2] = given.compressor << 5 | shuffled | (raw ? STORED_RAW : 0);
    to[3] = given.item;
    put(to + 4, chunk_bytes(given), 4);
    put(to + 8, given.block, 4);
    put(to + 12, (u32)size, 4);
}

// Write `count` bytes of the elements of a chunk, from byte `first` on, in their own order.
__device__ inline void put_elements(const encoding_t& given, u8* to, const u8* content, u32 first, u32 count, u32 lane) {
    const u32 n = given.block / given.item;
    const auto at = [&](u32 place) {
        const u32 element = place / given.item, block = element / n;
        return content[block * given.block + place % given.item * n + element - block * n];
    };
    const u32 words = (first | count) % 4 ? 0 : count / 4;
    for (u32 i = lane; i < words; i += 32) {
        u32 word = 0;
        for (u32 k = 0; k < 4; ++k) word |= (u32)at(first + 4 * i + k) << (8 * k);
        ((u32*)(to + first))[i] = word;
    }
    for (u32 i = 4 * words + lane; i < count; i += 32) to[first + i] = at(first + i);
}

extern "C" __global__ void __launch_bounds__(32) assemble(const encoding_t given) {
    const u32 lane = threadIdx.x, number = blockIdx.x / given.streams, stream = blockIdx.x % given.streams;
    const u32 size = given.sizes[blockIdx.x], length = stream_bytes(given, stream);
    const u8* whole = given.content + (u64)number * chunk_bytes(given);
    const u8* content = whole + stream * given.length;
    const u8* encoded = given.encoded + (u64)blockIdx.x * given.room;
    const u64 start = given.places[number * given.streams] - header_bytes(given);
    u8 *frame = given.host + start, *to = given.host + given.places[blockIdx.x];
    if (given.compressor == ZSTD) {
        if (lane == 0) {
            if (stream == 0) put_zstd_header(frame, chunk_bytes(given));
            put_block_header(to, size, length, stream + 1 == given.streams);
        }
        copy(to + BLOCK_HEADER, size == AS_IT_IS ? content : encoded, size == AS_IT_IS ? length : size & ~EQUAL, lane);
        return;
    }
    const u64 bytes = frame_bytes(given, number);
    const bool raw = bytes == chunk_bytes(given) + HEADER;
    if (lane == 0 && stream == 0) put_blosc_header(given, frame, bytes, raw);
    if (raw) {
        put_elements(given, frame + HEADER, whole, stream * length, length, lane);
        return;
    }
    if (lane == 0) {
        if (stream % given.item == 0) put(frame + HEADER + 4 * (stream / given.item), (u32)(to - frame), 4);
        put(to, compressed_bytes(given, size), 4);
    }
    to += 4;
    if (compressed_bytes(given, size) == length) {
        copy(to, content, length, lane);
        return;
    }
    if (given.compressor == BLOSC_ZSTD) {
        if (lane == 0) {
            put_zstd_header(to, length);
            put_block_header(to + ZSTD_HEADER, size, length, true);
        }
        to += ZSTD_HEADER + BLOCK_HEADER;
    }
    copy(to, encoded, size & ~EQUAL, lane);
}
