// epilogue.cuh: rearranges the sums of mma and wgmma, so that each lane has runs of four neighbours in a row
// of C. A lane then reads or writes a run by one access of 16 bytes.
//
// The instructions leave only two neighbours in a lane: of every 8 columns, lane 4 g + q has columns 2 q and
// 2 q + 1, in rows g and g + 8.
#pragma once

// Exchanges pairs of sums between two lanes whose numbers differ by `mask`, of which one is called odd. Each
// lane has a pair p of one block of columns and a pair q of another. The result is a run of four: the pairs p
// of both lanes in the lane that is not odd, the pairs q of both in the odd one.
__device__ inline float4 exchange(float p0, float p1, float q0, float q1, bool odd, int mask) {
    const float r0 = __shfl_xor_sync(~0u, odd ? p0 : q0, mask), r1 = __shfl_xor_sync(~0u, odd ? p1 : q1, mask);
    return odd ? make_float4(r0, r1, q0, q1) : make_float4(p0, p1, r0, r1);
}

__device__ inline float4 scaled(float alpha, float4 v) { return make_float4(alpha * v.x, alpha * v.y, alpha * v.z, alpha * v.w); }
__device__ inline float4 added(float4 v, float beta, float4 old) {
    return make_float4(beta * old.x + v.x, beta * old.y + v.y, beta * old.z + v.z, beta * old.w + v.w);
}

// Loads a run of four elements of C from p. If WHOLE, all four are inside C and p is aligned to 16 bytes. If
// not, only the first `valid` elements are loaded, and p is aligned if `aligned`.
template <bool WHOLE>
__device__ inline float4 load_run(const float* p, int valid, bool aligned) {
    if (WHOLE || (aligned && valid >= 4)) return *reinterpret_cast<const float4*>(p);
    float4 v = make_float4(0, 0, 0, 0);
    if (valid > 0) v.x = p[0];
    if (valid > 1) v.y = p[1];
    if (valid > 2) v.z = p[2];
    if (valid > 3) v.w = p[3];
    return v;
}
template <bool WHOLE>
__device__ inline void store_run(float* p, float4 v, int valid, bool aligned) {
    if (WHOLE || (aligned && valid >= 4)) {
        *reinterpret_cast<float4*>(p) = v;
        return;
    }
    if (valid > 0) p[0] = v.x;
    if (valid > 1) p[1] = v.y;
    if (valid > 2) p[2] = v.z;
    if (valid > 3) p[3] = v.w;
}
