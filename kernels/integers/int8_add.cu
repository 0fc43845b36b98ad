// int8_add: C = sums + beta * C, element by element. The sums are int32. beta = 0 never reads C.
//
// Macro: OOC_ACCUMULATED, the type of C.
// Launch: blocks of 256 threads. blockIdx.y is the row, blockIdx.x selects 1024 columns.
extern "C" __global__ void __launch_bounds__(256) int8_add(
    const int* __restrict__ sums, long long pitch, long long n, double beta, OOC_ACCUMULATED* __restrict__ c, long long ldc) {
    const int* const from = sums + blockIdx.y * pitch;
    OOC_ACCUMULATED* const to = c + blockIdx.y * ldc;
    for (int part = 0; part < 4; ++part) {
        const long long j = static_cast<long long>(blockIdx.x) * 1024 + part * 256 + threadIdx.x;
        if (j >= n) return;
        const OOC_ACCUMULATED value = from[j];
        to[j] = beta == 0 ? value : static_cast<OOC_ACCUMULATED>(beta) * to[j] + value;
    }
}
