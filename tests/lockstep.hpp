// lockstep.hpp: enough of CUDA for g++ to run plain kernels on a processor. Threads of a block are threads of the
// system, which meet at __syncthreads; blocks run one after the other, so that shared memory can be static.
//
// Macros: SOURCE, the file; RUNS, which of its kernels are to be called, such as RUN(finish).
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
};
struct int4 {
    int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline dim3 blockIdx, gridDim, blockDim;
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

template <typename... A, std::size_t... I>
void call(void (*kernel)(A...), void* const* arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

// `arguments` point to each of them, as for the driver.
template <typename... A>
void launch(void (*kernel)(A...), void* const* arguments, const unsigned* grid, const unsigned* block) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], 1};
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
                    call(kernel, arguments, std::index_sequence_for<A...>{});
                }
        });
    for (std::thread& thread : threads) thread.join();
}

#define RUN(kernel)                                                                                        \
    extern "C" void run_##kernel(void* const* arguments, const unsigned* grid, const unsigned* block) { \
        launch(kernel, arguments, grid, block);                                                         \
    }
RUNS
