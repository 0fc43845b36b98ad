// lockstep.hpp: enough of CUDA for g++ to run the plain rungs on a processor. Threads of a block are threads of the
// system, which meet at __syncthreads; blocks run one after the other, so that shared memory can be static.
#include <barrier>
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
#define __device__
#define __global__
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)

#include SOURCE

#ifdef DYNAMIC_SHARED
alignas(16) unsigned char shared[DYNAMIC_SHARED];
#endif

extern "C" void run(const gemm_arguments* arguments, const unsigned* grid, const unsigned* block) {
    gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x) {
            const unsigned count = block[0] * block[1];
            barrier = std::make_unique<std::barrier<>>(count);
            std::vector<std::thread> threads;
            for (unsigned t = 0; t < count; ++t)
                threads.emplace_back([=] {
                    threadIdx = {t % block[0], t / block[0], 0};
                    FUNCTION(*arguments);
                });
            for (std::thread& thread : threads) thread.join();
        }
}
