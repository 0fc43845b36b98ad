// Copy and set bytes, by a warp.
#pragma once

#include "decoding/streams.cuh"

// Copy bytes, by a warp. Source and target do not overlap.
__device__ inline void copy(u8* target, const u8* source, u32 count, u32 lane) {
    constexpr u32 AT_ONCE = 8;
    const u32 head = min(count, -(u32)(u64)target & 3);
    if (lane < head) target[lane] = source[lane];
    target += head;
    source += head;
    count -= head;
    const u32 words = count / 4, shift = 8 * ((u32)(u64)source & 3);
    const u32* from = (const u32*)(source - shift / 8);
    u32* to = (u32*)target;
    for (u32 i = lane; i < words; i += 32 * AT_ONCE) {
        u32 found[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u32 at = i + 32 * k;
            if (at < words) found[k] = shift ? __funnelshift_r(from[at], from[at + 1], shift) : from[at];
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            if (i + 32 * k < words) to[i + 32 * k] = found[k];
        }
    }
    const u32 rest = 4 * words + lane;
    if (rest < count) target[rest] = source[rest];
}

// Set bytes, by a warp.
__device__ inline void fill(u8* target, u32 byte, u32 count, u32 lane) {
    const u32 head = min(count, -(u32)(u64)target & 3);
    if (lane < head) target[lane] = (u8)byte;
    target += head;
    count -= head;
    for (u32 i = lane; i < count / 4; i += 32) ((u32*)target)[i] = 0x01010101 * byte;
    const u32 rest = (count & ~3u) + lane;
    if (rest < count) target[rest] = (u8)byte;
}
