// lockstep.hpp: enough of CUDA for g++ to run plain kernels on a processor. Threads of a block are threads of the
// system, which meet at __syncthreads; blocks run one after the other, so that shared memory can be static.
//
// Macros: SOURCE, the file; FUNCTION, a rung; or RUNS, what of other kernels is to be called, such as RUN(finish, arguments).
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};
inline dim3 blockIdx, gridDim;
inline thread_local dim3 threadIdx;
inline std::unique_ptr<std::barrier<>> barrier;
inline void __syncthreads() { barrier->arrive_and_wait(); }
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned __byte_perm(unsigned x, unsigned, unsigned) { return __builtin_bswap32(x); }  // for 0x0123
inline void atomicAdd(unsigned* to, unsigned value) { std::atomic_ref(*to) += value; }
using std::fabs, std::memcpy, std::sqrt;
#define __device__
#define __global__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)

#include SOURCE

#ifdef DYNAMIC_SHARED
alignas(16) unsigned char shared[DYNAMIC_SHARED];
#endif

template <typename Arguments>
void lockstep(void (*kernel)(Arguments), const Arguments* arguments, const unsigned* grid, const unsigned* block) {
    gridDim = {grid[0], grid[1], grid[2]};
    const unsigned count = block[0] * block[1];
    barrier = std::make_unique<std::barrier<>>(count);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < count; ++t)
        threads.emplace_back([=] {
            threadIdx = {t % block[0], t / block[0], 0};
            for (unsigned y = 0; y < grid[1]; ++y)
                for (unsigned x = 0; x < grid[0]; ++x) {
                    __syncthreads();
                    if (t == 0) blockIdx = {x, y, 0};
                    __syncthreads();
                    kernel(*arguments);
                }
        });
    for (std::thread& thread : threads) thread.join();
}

#ifdef FUNCTION
extern "C" void run(const gemm_arguments* arguments, const unsigned* grid, const unsigned* block) {
    lockstep(FUNCTION, arguments, grid, block);
}
#else
#define RUN(kernel, type)                                                                             \
    extern "C" void run_##kernel(const type* arguments, const unsigned* grid, const unsigned* block) { \
        lockstep(kernel, arguments, grid, block);                                                     \
    }
RUNS
#endif
