// finish: result = narrow(alpha * sum + beta * result), elementwise: the epilogue of a strip of C.
//
// Used if the accumulator is wider than C (float32 for float16). `result` contains the old C if beta != 0.
// beta = 0 never reads it.
#include "common/scalar.cuh"

extern "C" __global__ void finish(
    long long elements,
    double alpha_re, double alpha_im,
    const OOC_ACCUMULATED* __restrict__ sum,
    double beta_re, double beta_im,
    OOC_STORED* __restrict__ result) {
    const OOC_ACCUMULATED alpha = make_scalar<OOC_ACCUMULATED>::of(alpha_re, alpha_im);
    const OOC_ACCUMULATED beta = make_scalar<OOC_ACCUMULATED>::of(beta_re, beta_im);
    const bool keeps_old = beta_re != 0 || beta_im != 0;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long e = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; e < elements; e += stride) {
        OOC_ACCUMULATED value = scaled(alpha, sum[e]);
        if (keeps_old) value = multiply_add(beta, OOC_ACCUMULATED(widen(result[e])), value);
        narrow(value, result[e]);
    }
}
