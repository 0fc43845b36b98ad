// frames: finds the compressed streams in the frames (the stored bytes) of many chunks, a warp per chunk.
//
// A chunk of the codec zstd is a frame of one stream. A blosc frame consists of a header of 16 bytes, the offsets of
// its blocks, and the blocks. A block is stored as one stream or, if it is split, as one stream per byte of an element.
// The length of each stream precedes it. A stream that is as long as its content is stored raw.
//
// Every field is checked. A frame that is damaged, or valid but unusual, gets a status other than 0, and no streams.
//
// Source: the format of c-blosc 1.21 (README_CHUNK_FORMAT.rst, blosc.c).
//
// Launch: a block of 32 threads per chunk.

#include "decoding/streams.cuh"

constexpr u32 HEADER = 16, VERSION = 2, STREAM_VERSION = 1;
// Bits of the flags in the header of blosc.
constexpr u32 SHUFFLED = 1, STORED_RAW = 2, RESERVED = 8, BITSHUFFLED = 4, UNSPLIT = 16;
// Blosc splits a block if elements have at most so many bytes, and streams then have at least so many.
constexpr u32 MAX_SPLITS = 16, MIN_STREAM = 128;

// How a chunk is divided.
struct layout_t {
    u32 order, block, blocks, split, raw;
};

__device__ inline bool header(const batch_t& batch, const u8* source, u64 stored, layout_t& found) {
    if (stored < HEADER) return false;
    const u32 flags = source[2], typesize = source[3], chunk = batch.chunk;
    if (source[0] != VERSION || source[1] != STREAM_VERSION || (flags & RESERVED) || !typesize) return false;
    if (read(source + 4, 4) != chunk || read(source + 12, 4) != stored) return false;
    if ((flags & SHUFFLED) && (flags & BITSHUFFLED)) return false;
    found.raw = (flags & STORED_RAW) != 0;
    found.order = flags & BITSHUFFLED ? BITS : (flags & SHUFFLED) && typesize > 1 ? BYTES : PLAIN;
    if (found.order != PLAIN && typesize != batch.itemsize) return false;
    found.block = read(source + 8, 4);
    if (found.raw) {
        found.order = PLAIN;
        found.block = chunk;
    }
    if (!found.block || found.block > chunk || found.block % typesize || found.block % batch.itemsize) return false;
    found.blocks = (chunk + found.block - 1) / found.block;
    found.split = 1;
    if (found.raw) return stored == chunk + HEADER;
    if (flags >> 5 != batch.compressor || HEADER + 4ull * found.blocks > stored) return false;
    if (!(flags & UNSPLIT) && typesize <= MAX_SPLITS && found.block >= MIN_STREAM * typesize) found.split = typesize;
    return true;
}

__device__ inline void put(const batch_t& batch, u32 stream, const u8* source, u32 size, u64 target, u32 length,
                           u32 chunk, bool raw) {
    u8* content = batch.content + target;
    batch.streams[stream] = {source, content, size, length, chunk, raw, 0, 0};
    batch.pointers[stream] = raw ? source : content;
}

// Walk through the streams of a block. Write them from stream number `first` of all on, unless it is negative.
__device__ inline bool walk(const batch_t& batch, const chunk_t& chunk, const layout_t& layout, u32 number, u32 block,
                            long long first) {
    const u32 begin = block * layout.block, left = batch.chunk - begin;
    const u32 content = left < layout.block ? left : layout.block, parts = left < layout.block ? 1 : layout.split;
    const u64 target = (u64)number * batch.chunk + begin;
    if (layout.raw) {
        if (first >= 0) put(batch, (u32)first, chunk.source + HEADER, content, target, content, number, true);
        return true;
    }
    u64 at = read(chunk.source + HEADER + 4 * block, 4);
    if (at < HEADER + 4 * layout.blocks) return false;
    const u32 each = content / parts;
    for (u32 j = 0; j < parts; ++j) {
        if (at + 4 > chunk.stored) return false;
        const u32 size = read(chunk.source + at, 4);
        at += 4;
        if (!size || at + size > chunk.stored) return false;
        if (first >= 0) {
            put(batch, (u32)first + block * layout.split + j, chunk.source + at, size, target + j * each, each, number,
                size == each);
        }
        at += size;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(32) frames(const batch_t batch) {
    const u32 number = blockIdx.x, lane = threadIdx.x;
    chunk_t& chunk = batch.chunks[number];
    layout_t layout = {PLAIN, batch.chunk, 1, 1, 0};
    // The status tells whether the checksum matches.
    bool fine = chunk.stored > 0 && !batch.statuses[number] && (!batch.compressor || header(batch, chunk.source, chunk.stored, layout));
    if (fine && batch.compressor) {
        for (u32 b = lane; b < layout.blocks; b += 32) fine = walk(batch, chunk, layout, number, b, -1) && fine;
    }
    fine = __ballot_sync(ALL, !fine) == 0;
    u32 first = 0;
    if (fine) {
        const u32 count = batch.chunk / layout.block * layout.split + (batch.chunk % layout.block ? 1 : 0);
        if (lane == 0) first = atomicAdd(&batch.counters->streams, count);
        first = __shfl_sync(ALL, first, 0);
        if (first + count > batch.max_streams) {
            fine = false;  // what is left has nothing to decode
            for (u32 i = first + lane; i < batch.max_streams; i += 32) batch.streams[i].raw = 1;
        } else if (batch.compressor) {
            for (u32 b = lane; b < layout.blocks; b += 32) walk(batch, chunk, layout, number, b, first);
        } else if (lane == 0) {
            put(batch, first, chunk.source, (u32)chunk.stored, (u64)number * batch.chunk, batch.chunk, number, false);
        }
    }
    if (lane == 0) {
        chunk.first = first;
        chunk.split = layout.split;
        chunk.order = layout.order;
        chunk.block = layout.block;
        if (!fine) {
            chunk.rows = 0;  // `place` composes nothing
            batch.statuses[number] = 1;
        }
    }
}
