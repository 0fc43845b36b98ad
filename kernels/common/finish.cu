// finish: result = alpha * sum + beta * result, element by element, rounded to the type of the result.
//
// It runs on some rows of C after all products have been added up, if the sums have a wider type than C: for
// example float32 sums for a float16 C. If beta != 0, `result` contains the old C. beta = 0 never reads it.
//
// Where both addresses allow it, a thread loads and stores four elements at once.
#include "common/scalar.cuh"

template <typename T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) four_t {
    T x[4];
};

template <typename T>
__device__ inline bool is_aligned(const T* x) {
    return reinterpret_cast<unsigned long long>(x) % alignof(four_t<T>) == 0;
}

extern "C" __global__ void finish(
    long long elements,
    double alpha_re, double alpha_im,
    const OOC_ACCUMULATED* __restrict__ sum,
    double beta_re, double beta_im,
    OOC_STORED* __restrict__ result) {
    const OOC_ACCUMULATED alpha = make_scalar<OOC_ACCUMULATED>::of(alpha_re, alpha_im);
    const OOC_ACCUMULATED beta = make_scalar<OOC_ACCUMULATED>::of(beta_re, beta_im);
    const bool keeps_old = beta_re != 0 || beta_im != 0;
    const auto finished = [&](OOC_ACCUMULATED added, OOC_STORED& element) {
        OOC_ACCUMULATED value = scaled(alpha, added);
        if (keeps_old) value = multiply_add(beta, OOC_ACCUMULATED(widen(element)), value);
        narrow(value, element);
    };
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long fours = is_aligned(sum) && is_aligned(result) ? elements / 4 : 0;
    const auto* sums = reinterpret_cast<const four_t<OOC_ACCUMULATED>*>(sum);
    auto* results = reinterpret_cast<four_t<OOC_STORED>*>(result);
    for (long long e = first; e < fours; e += stride) {
        const four_t<OOC_ACCUMULATED> added = sums[e];
        four_t<OOC_STORED> four = {};
        if (keeps_old) four = results[e];
        for (int i = 0; i < 4; ++i) finished(added.x[i], four.x[i]);
        results[e] = four;
    }
    for (long long e = 4 * fours + first; e < elements; e += stride) finished(sum[e], result[e]);
}
