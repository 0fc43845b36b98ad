// shuffle: gathers the elements of chunks from a strip of C, and divides them into streams.
//
// The kernel is bound by memory. Each thread takes one element at a time, so that the threads of a warp write
// neighbouring bytes.
//
// Launch: blocks of 32 threads. blockIdx.y selects the chunk. The thread blocks along x share its elements.

#include "encoding/encoding.cuh"

template <u32 ITEM>
struct alignas(ITEM) element_t {
    u8 bytes[ITEM];
};

template <u32 ITEM>
__device__ inline void gather(const encoding_t& given) {
    using element = element_t<ITEM>;
    const u32 number = given.first + blockIdx.y, top = number / given.across * given.height;
    const u32 left = number % given.across * given.width;
    const u32 size = given.height * given.width, n = given.compressor == ZSTD ? 1 : given.block / ITEM;
    u8* content = given.content + (u64)blockIdx.y * size * ITEM;
    for (u32 e = blockIdx.x * 32 + threadIdx.x; e < size; e += gridDim.x * 32) {
        const u32 down = e / given.width, right = e - down * given.width, block = e / n, i = e - block * n;
        element found = {};
        if (top + down < given.rows && left + right < given.cols) {
            found = ((const element*)given.strip)[(u64)(top + down) * given.cols + left + right];
        }
        u8* to = content + block * n * ITEM + i;
        if (n == 1) {
            *(element*)to = found;
        } else {
#pragma unroll
            for (u32 j = 0; j < ITEM; ++j) to[j * n] = found.bytes[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32) shuffle(const encoding_t given) {
    switch (given.item) {
        case 1: return gather<1>(given);
        case 2: return gather<2>(given);
        case 4: return gather<4>(given);
        case 8: return gather<8>(given);
        case 16: return gather<16>(given);
    }
}
