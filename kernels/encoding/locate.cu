// locate: finds the size and the place of each frame of a batch, and of each stream in its frame.
//
// Launch: one block of 32 threads.

#include "encoding/streams_in_frames.cuh"

extern "C" __global__ void __launch_bounds__(32) locate(const encoding_t given) {
    const u32 lane = threadIdx.x, chunk = chunk_bytes(given);
    const u32 before = header_bytes(given);
    u64 start = given.first ? *given.end : given.frames;
    for (u32 number = 0; number < given.count; ++number) {
        u64 at = before;
        for (u32 first = 0; first < given.streams; first += 32) {
            const u32 stream = first + lane;
            const bool present = stream < given.streams;
            const u32 own = present ? stored_bytes(given, number, stream) : 0;
            u32 upto = own;
            for (int d = 1; d < 32; d <<= 1) {
                const u32 other = __shfl_up_sync(ALL, upto, d);
                if (lane >= d) upto += other;
            }
            if (present) given.places[number * given.streams + stream] = start + at + upto - own;
            at += __shfl_sync(ALL, upto, 31);
        }
        if (given.compressor != ZSTD && at > chunk + HEADER) at = chunk + HEADER;  // stored without compression
        if (lane == 0) {
            u64* index = (u64*)given.host + 2 * (given.first + number);
            index[0] = start;
            index[1] = frame_bytes(given, number) = at;
        }
        start += (at + CHECKSUM + PAGE - 1) / PAGE * PAGE;
    }
    if (lane == 0) *given.end = start;
}
