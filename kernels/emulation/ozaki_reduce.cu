// ozaki_reduce: reduces int32 sums modulo p to int8 residues. The sums are of products of residues, for an
// emulated product (planning/emulation.py). `quads` is the number of elements divided by 4.
//
// Launch: any number of blocks of 256 threads.
#include "emulation/residue.cuh"

extern "C" __global__ void __launch_bounds__(256) ozaki_reduce(
    const int4* __restrict__ sums, unsigned* __restrict__ residues, long long quads, int p, int inverse, int high_residue) {
    const auto reduced = [&](int y) {  // high_residue = 2^16 mod p
        return static_cast<unsigned>(residue((y >> 16) * high_residue + (y & 0xffff), p, inverse) & 0xff);
    };
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < quads; i += stride) {
        const int4 y = sums[i];
        residues[i] = reduced(y.x) | reduced(y.y) << 8 | reduced(y.z) << 16 | reduced(y.w) << 24;
    }
}
