// finish: result = alpha * sum + beta * result, element by element, rounded to the type of the result.
//
// It runs on some rows of C after all products have been added up, if the sums have a wider type than C: for
// example float32 sums for a float16 C. If beta != 0, `result` contains the old C. beta = 0 never reads it.
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
