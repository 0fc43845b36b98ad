// lockstep.hpp: enough of CUDA for g++ to run plain kernels on a processor. The threads of a block are fibers of one
// thread of the system. One runs at a time, until it meets the others: those of its block at __syncthreads, those of
// its warp at __syncwarp and in __ballot_sync, which all of them must call. Between two meetings, threads run in
// ascending or in descending order, by turns, so that a missing __syncthreads gives wrong results. Blocks run one
// after the other, so that shared memory can be static.
//
// Macros: SOURCE, the file; RUNS, which of its kernels are to be called, such as RUN(finish).
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

struct dim3 {
    unsigned x, y, z;
};
struct int4 {
    int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline dim3 threadIdx, blockIdx, gridDim, blockDim;

constexpr unsigned MAX_THREADS = 1024, WARP = 32, STACK = 1 << 18;
enum class state_t { runs, meets_warp, meets_block, ended };
// A fiber starts by a context, and switches by jumps: a switch of contexts is a system call.
struct fiber_t {
    jmp_buf place;
    ucontext_t context;
    dim3 index;
    state_t state;
    bool started;
};
inline fiber_t fibers[MAX_THREADS];
inline unsigned votes[MAX_THREADS / WARP];
inline jmp_buf scheduler;
inline unsigned current;  // the fiber that runs

__attribute__((noinline)) inline void leave(state_t state) {
    fibers[current].state = state;
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(unsigned number) {
    fiber_t& fiber = fibers[current = number];
    threadIdx = fiber.index;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
inline void __syncthreads() { leave(state_t::meets_block); }
inline void __syncwarp() { leave(state_t::meets_warp); }
inline unsigned __ballot_sync(unsigned, bool vote) {
    unsigned& of_warp = votes[current / WARP];
    if (vote) of_warp |= 1u << current % WARP;
    __syncwarp();
    const unsigned found = of_warp;
    __syncwarp();
    of_warp = 0;
    __syncwarp();
    return found;
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
T atomicAdd(T* to, T value) {
    const T before = *to;
    *to += value;
    return before;
}
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

// Let the fibers numbered `from` to `to` run on if all of them are in this state. Say whether they were.
inline bool met(unsigned from, unsigned to, state_t state) {
    for (unsigned t = from; t < to; ++t)
        if (fibers[t].state != state) return false;
    for (unsigned t = from; t < to; ++t) fibers[t].state = state_t::runs;
    return true;
}

// Run the threads of one block until all have ended. Abort if some wait for others that do not come.
inline void run_block(unsigned count, bool descending) {
    for (;; descending = !descending) {
        for (unsigned i = 0; i < count; ++i) {
            const unsigned t = descending ? count - 1 - i : i;
            if (fibers[t].state == state_t::runs) resume(t);
        }
        if (met(0, count, state_t::ended)) return;
        bool any = met(0, count, state_t::meets_block);
        for (unsigned w = 0; w < count; w += WARP)
            any |= met(w, w + WARP < count ? w + WARP : count, state_t::meets_warp);
        if (!any) {
            fprintf(stderr, "some threads of a block wait for others, which wait elsewhere or have ended\n");
            abort();
        }
    }
}

inline void (*body)(const void*);
inline const void* given;
// Every fiber runs the kernel once per block.
inline void loop() {
    for (;;) {
        body(given);
        leave(state_t::ended);
    }
}

template <typename... A>
struct call_t {
    void (*kernel)(A...);
    void* const* arguments;
    template <std::size_t... I>
    void run(std::index_sequence<I...>) const {
        kernel(*static_cast<A*>(arguments[I])...);
    }
};

// `arguments` point to each of them, as for the driver.
template <typename... A>
void launch(void (*kernel)(A...), void* const* arguments, const unsigned* grid, const unsigned* block) {
    const call_t<A...> call{kernel, arguments};
    given = &call;
    body = [](const void* from) {
        static_cast<const call_t<A...>*>(from)->run(std::index_sequence_for<A...>{});
    };
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], 1};
    const unsigned count = block[0] * block[1];
    static char* const stacks = static_cast<char*>(malloc(std::size_t(MAX_THREADS) * STACK));
    for (unsigned t = 0; t < count; ++t) {
        fiber_t& fiber = fibers[t];
        fiber.index = {t % block[0], t / block[0], 0};
        fiber.started = false;
        fiber.state = state_t::runs;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + std::size_t(t) * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, loop, 0);
    }
    for (unsigned y = 0; y < grid[1]; ++y)
        for (unsigned x = 0; x < grid[0]; ++x) {
            blockIdx = {x, y, 0};
            run_block(count, (x + y) % 2);
        }
}

#define RUN(kernel)                                                                                        \
    extern "C" void run_##kernel(void* const* arguments, const unsigned* grid, const unsigned* block) { \
        launch(kernel, arguments, grid, block);                                                         \
    }
RUNS
