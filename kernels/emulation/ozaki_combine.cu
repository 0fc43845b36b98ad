// ozaki_combine: C = alpha * (what the residues stand for) * 2^-(sA + sB) + beta * C, by the Chinese remainder theorem.
//
// The sums of weights' parts are exact in float64, and so are the products with the quotient (planning/emulation.py).
//
// Macros: OOC_STORED (of C), OOC_WEIGHTS (3 N parts), OOC_MODULUS (3), OOC_INVERSE (1 / P).
// Launch: 256 threads; blockIdx.y a row, blockIdx.x 1024 columns.
constexpr double WEIGHTS[][3] = {OOC_WEIGHTS}, MODULUS[] = {OOC_MODULUS};
constexpr int NUMBER = sizeof(WEIGHTS) / sizeof(WEIGHTS[0]);

__device__ inline double power(int e) { return __longlong_as_double(static_cast<long long>(e + 1023) << 52); }

// The I-th of four signed bytes. The bits of 2^52 + 128 + it are put together: converting takes four times as long.
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
        // Exponents of each side lie between -1030 and 1140: their powers are taken in two factors each.
        const int e = -(s + column_exponents[first + i]), half = e >> 1, quarter = half >> 1;
        double scaled = alpha * value * power(quarter) * power(half - quarter);
        scaled *= power((e - half) >> 1);
        scaled *= power(e - half - ((e - half) >> 1));
        *to = static_cast<OOC_STORED>(beta == 0 ? scaled : fma(beta, static_cast<double>(*to), scaled));
    }
}
