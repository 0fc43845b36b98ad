// lockstep.hpp: enough of CUDA for g++ to run plain kernels on a processor. Threads of a block are threads of the
// system, which meet at __syncthreads; blocks run one after the other, so that shared memory can be static. The
// threads of a warp, 32 along x, also meet at __syncwarp and in __ballot_sync, which must be called by all of them.
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
struct warp_t {
    std::barrier<> barrier{32};
    std::atomic<unsigned> votes{0};
};
inline std::vector<std::unique_ptr<warp_t>> warps;
inline void __syncwarp() { warps[threadIdx.x / 32]->barrier.arrive_and_wait(); }
inline unsigned __ballot_sync(unsigned, bool vote) {
    warp_t& warp = *warps[threadIdx.x / 32];
    if (vote) warp.votes |= 1u << threadIdx.x % 32;
    __syncwarp();
    const unsigned votes = warp.votes;
    __syncwarp();
    warp.votes = 0;
    __syncwarp();
    return votes;
}
template <typename T>
T __ldcs(const T* at) { return *at; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, 8);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}
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
template <typename T>
T atomicAdd(T* to, T value) { return std::atomic_ref(*to).fetch_add(value); }
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
    warps.clear();
    for (unsigned w = 0; w < count / 32; ++w) warps.push_back(std::make_unique<warp_t>());
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
