// ozaki_combine: C = alpha * x * 2^-(sA + sB) + beta * C, where the Chinese remainder theorem gives x from
// its residues.
//
// The sums of the parts of the weights are exact in float64, and so are the products with the quotient
// (planning/emulation.py).
//
// Macros: OOC_STORED (of C), OOC_WEIGHTS (3 N parts), OOC_MODULUS (3), OOC_INVERSE (1 / P).
// Launch: 256 threads; one row per blockIdx.y, 1024 columns per blockIdx.x.
constexpr double WEIGHTS[][3] = {OOC_WEIGHTS}, MODULUS[] = {OOC_MODULUS};
constexpr int NUMBER = sizeof(WEIGHTS) / sizeof(WEIGHTS[0]);

__device__ inline double power(int e) { return __longlong_as_double(static_cast<long long>(e + 1023) << 52); }

// The I-th of four signed bytes as double. It assembles the bits of 2^52 + 128 + byte: a conversion takes
// four times as long.
template <int I>
__device__ inline double value_of(unsigned four) {
    return __hiloint2double(0x43300000, (four ^ 0x80808080) >> 8 * I & 0xff) - (0x1p52 + 128);
}

extern "C" __global__ void __launch_bounds__(256) ozaki_combine(
    const signed char* __restrict__ residues, long long pitch, long long plane, int n, const int* __restrict__ row_exponents,
    const int* __restrict__ column_exponents, double alpha, double beta, OOC_STORED* __restrict__ c, long long ldc) {
    const int row = blockIdx.y, first = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (first >= n) return;
    double sum[4][3] = {};
#pragma unroll
    for (int l = 0; l < NUMBER; ++l) {
        const unsigned four = *reinterpret_cast<const unsigned*>(residues + l * plane + row * pitch + first);
        const double r[4] = {value_of<0>(four), value_of<1>(four), value_of<2>(four), value_of<3>(four)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 3; ++j) sum[i][j] = fma(WEIGHTS[l][j], r[i], sum[i][j]);
    }
    const int s = row_exponents[row];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i >= n) return;
        const double q = rint(sum[i][0] * OOC_INVERSE);
        const double value = fma(-q, MODULUS[0], sum[i][0]) + fma(-q, MODULUS[1], sum[i][1]) + fma(-q, MODULUS[2], sum[i][2]);
        OOC_STORED* to = c + row * ldc + first + i;
        // The exponents of A and B are between -1030 and 1140 each, so the power of two is applied in four
        // factors.
        const int e = -(s + column_exponents[first + i]), half = e >> 1, quarter = half >> 1;
        double scaled = alpha * value * power(quarter) * power(half - quarter);
        scaled *= power((e - half) >> 1);
        scaled *= power(e - half - ((e - half) >> 1));
        *to = static_cast<OOC_STORED>(beta == 0 ? scaled : fma(beta, static_cast<double>(*to), scaled));
    }
}
