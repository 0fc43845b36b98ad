// lz4: finds the sequences of many LZ4 streams, for `execute`, which appends their literals and matches.
//
// A stream consists of sequences. A sequence has a number of literals, these literals, and the offset and the length of
// a match. Where the next sequence begins follows from these lengths, so one thread per stream finds them in order. It
// counts them first, to reserve memory. `execute` treats the sequences of a stream as one block of zstd, whose literals
// stay in the stream.
// An array in the memory for literals says where the literals of each sequence begin.
//
// All is checked as LZ4_decompress_safe of lz4 1.9 does. A stream that is damaged sets the status of its chunk.
//
// Source: the block format of LZ4 (lz4_Block_format.md).
//
// Launch: blocks of 32 threads, as many as can work at a time.

#include "decoding/streams.cuh"

// At the end of a stream, no match begins within the last MARGIN bytes of the content, or ends within the last LAST.
// After other literals than the last ones, there are an offset, a token, and LAST literals.
constexpr u32 MARGIN = 12, LAST = 5, AFTER = 8;

// Writes sequences, unless `found` is null, and counts them. Those with too large numbers are divided.
struct writer_t {
    u64* found;
    u32* places;
    u32 count, literals;

    __device__ void one(u32 offset, u32 length, u32 literals, u32 place) {
        if (found) {
            found[count] = (u64)offset << OFFSET_AT | (u64)length << LENGTH_AT | literals;
            places[count] = place;
        }
        ++count;
    }
    __device__ void add(u32 offset, u32 length, u32 number, u32 place) {
        literals += number;
        for (; number > MAX_LITERALS; number -= MAX_LITERALS, place += MAX_LITERALS) one(0, 0, MAX_LITERALS, place);
        while (length > MAX_LENGTH) {
            one(offset, MAX_LENGTH, number, place);
            length -= MAX_LENGTH;
            number = 0;
        }
        one(offset, length, number, place);
    }
};

// Add the bytes that follow to a number, up to one that is not 255. Returns false if the number exceeds `most`.
__device__ inline bool longer(const stream_t& stream, u32& at, u32& number, u32 most) {
    for (;;) {
        if (at >= stream.size) return false;
        const u32 byte = stream.source[at++];
        number += byte;
        if (number > most) return false;
        if (byte != 255) return true;
    }
}

__device__ inline bool parse(const stream_t& stream, writer_t& writer) {
    const u8* source = stream.source;
    const u32 size = stream.size, length = stream.length;
    for (u32 at = 0, done = 0;;) {
        if (at >= size) return false;
        const u32 token = source[at++];
        u32 literals = token >> 4, match = token & 15, offset = 0;
        if (literals == 15 && !longer(stream, at, literals, length)) return false;
        if (literals > size - at || literals > length - done) return false;
        const u32 place = at;
        at += literals;
        done += literals;
        if (at == size) {
            writer.add(0, 0, literals, place);
            return done == length;
        }
        if (size - at < AFTER || length - done < MARGIN) return false;
        offset = read(source + at, 2);
        at += 2;
        if (match == 15 && !longer(stream, at, match, length)) return false;
        match += 4;
        if (!offset || offset > done || match > length - done || length - done - match < LAST) return false;
        done += match;
        writer.add(offset, match, literals, place);
    }
}

extern "C" __global__ void __launch_bounds__(32) lz4_parse(const batch_t batch) {
    if (threadIdx.x) return;
    const u32 streams = min(batch.counters->streams, batch.max_streams);
    const u64 room = min(batch.max_sequences, batch.max_literals / 4);
    for (;;) {
        const u32 number = atomicAdd(&batch.counters->decoded, 1);
        if (number >= streams) return;
        stream_t& stream = batch.streams[number];
        if (stream.raw) continue;
        writer_t writer = {nullptr, nullptr, 0, 0};
        bool fine = parse(stream, writer);
        if (fine) {
            const u32 block = atomicAdd(&batch.counters->blocks, 1);
            const u64 first = atomicAdd(&batch.counters->sequences, (u64)writer.count);
            fine = block < batch.max_blocks && first + writer.count <= room;
            if (fine) {
                block_t found = {};
                found.literals = stream.source;
                found.places = (u32*)batch.literals + first;
                found.first_sequence = first;
                found.kind = COMPRESSED;
                found.content = stream.length;
                found.literal_step = 1;
                found.literal_count = writer.literals;
                found.sequences = writer.count;
                for (u32 i = 0; i < 3; ++i) found.offsets[i] = 1;
                writer = {batch.sequences + first, (u32*)batch.literals + first, 0, 0};
                parse(stream, writer);
                batch.blocks[block] = found;
                stream.first = block;
                stream.blocks = 1;
            }
        }
        if (!fine) batch.statuses[stream.chunk] = 2;
    }
}
