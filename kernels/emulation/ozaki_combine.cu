// ozaki_combine: the last step of an emulated product. It computes C = alpha * x * 2^-(sA + sB) + beta * C,
// element by element. x is the integer product, whose residues modulo N small numbers are given; the Chinese
// remainder theorem reconstructs x from them. sA and sB are the exponents by which a row of op(A) and a
// column of op(B) were scaled to integers. planning/emulation.py describes the method.
//
// Macros; P is the product of the N moduli
//   OOC_STORED    the type of C
//   OOC_WEIGHTS   per modulus p, the number (P / p) ((P / p)^-1 mod p), as a sum of 3 doubles
//   OOC_MODULUS   P, as a sum of 3 doubles
//   OOC_INVERSE   1 / P
// The three doubles are so short that the sums and products with them below are exact.
// Launch: blocks of 256 threads. blockIdx.y is the row, blockIdx.x selects 1024 columns.
constexpr double WEIGHTS[][3] = {OOC_WEIGHTS}, MODULUS[] = {OOC_MODULUS};
constexpr int NUMBER = sizeof(WEIGHTS) / sizeof(WEIGHTS[0]);

__device__ inline double power(int e) { return __longlong_as_double(static_cast<long long>(e + 1023) << 52); }

// Returns the I-th of four signed bytes as a double. It assembles the bits of 2^52 + 128 + byte and subtracts
// 2^52 + 128. A conversion instruction would take four times as long.
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
        // Each of the two exponents is between -1030 and 1140. So their sum may exceed the range of a
        // double's exponent, and the power of two is applied as four factors.
        const int e = -(s + column_exponents[first + i]), half = e >> 1, quarter = half >> 1;
        double scaled = alpha * value * power(quarter) * power(half - quarter);
        scaled *= power((e - half) >> 1);
        scaled *= power(e - half - ((e - half) >> 1));
        *to = static_cast<OOC_STORED>(beta == 0 ? scaled : fma(beta, static_cast<double>(*to), scaled));
    }
}
