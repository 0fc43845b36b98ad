// epilogue.cuh: from the sums of a tensor instruction to runs of four along a row of C, which leave as one 16-byte access.
//
// The accumulators of mma and wgmma lie two in a row: lane 4 g + q holds columns 2 q and 2 q + 1 of an 8-column block, in rows
// g and g + 8.
#pragma once

// Two lanes that differ in `mask` hold the pairs p and q each; the even one gets four of p in a row, the odd one four of q.
__device__ inline float4 exchange(float p0, float p1, float q0, float q1, bool odd, int mask) {
    const float r0 = __shfl_xor_sync(~0u, odd ? p0 : q0, mask), r1 = __shfl_xor_sync(~0u, odd ? p1 : q1, mask);
    return odd ? make_float4(r0, r1, q0, q1) : make_float4(p0, p1, r0, r1);
}

__device__ inline float4 scaled(float alpha, float4 v) { return make_float4(alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w); }
__device__ inline float4 added(float4 v, float beta, float4 old) {
    return make_float4(beta * old.x + v.x, beta * old.y + v.y, beta * old.z + v.z, beta * old.w + v.w);
}

// One run at p, of which only the first `valid` elements are C's. beta = 0 does not read.
__device__ inline void write_some(float* p, float4 v, float beta, int valid) {
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < valid) p[e] = beta == 0 ? values[e] : beta * p[e] + values[e];
}
