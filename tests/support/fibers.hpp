// fibers.hpp: enough of CUDA for g++ to run kernels of one warp per block on a processor, fast. The threads of a warp
// are fibers: one runs at a time, until all meet in __syncwarp, a shuffle or a vote. All must call these.
// (lockstep.hpp has threads of the system, and blocks of several warps.)
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__
#define __align__(bytes)

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, gridDim;

// A fiber starts by a context, and switches by jumps: a switch of contexts is a system call.
struct fiber_t {
    jmp_buf place;
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 18);
    unsigned meetings;
    bool started, ended;
};
static fiber_t fibers[32];
static jmp_buf warp;
// What the threads have brought to this meeting and to the one before.
static unsigned long long brought[2][32];
static std::function<void()> body;

static unsigned long long* meet(unsigned long long value) {
    const unsigned me = threadIdx.x, here = fibers[me].meetings++ & 1;
    brought[here][me] = value;
    if (!_setjmp(fibers[me].place)) _longjmp(warp, 1);
    return brought[here];
}
template <typename T>
T taken(unsigned long long value) {
    T found;
    memcpy(&found, &value, sizeof found);
    return found;
}
template <typename T>
unsigned long long given(T value) {
    unsigned long long found = 0;
    memcpy(&found, &value, sizeof value);
    return found;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    return taken<T>(meet(given(value))[from & 31]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
    const unsigned me = threadIdx.x;
    return taken<T>(meet(given(value))[me >= by ? me - by : me]);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned long long* all = meet(vote);
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= (unsigned)all[i] << i;
    return found;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline void __syncwarp() { meet(0); }
template <typename T, typename U>
T atomicAdd(T* to, U value) {
    const T before = *to;
    *to += (T)value;
    return before;
}
template <typename T>
T atomicMax(T* to, T value) {
    const T before = *to;
    *to = max(before, value);
    return before;
}
inline void atomicXor(unsigned* to, unsigned value) { *to ^= value; }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }

static void enter(int number) {
    body();
    fibers[number].ended = true;
    _longjmp(warp, 1);
}

static void resume(fiber_t& fiber) {
    if (_setjmp(warp)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// Run a kernel with one warp per block. Abort if some threads end while others meet.
template <typename F>
void launch(unsigned blocks, F kernel, unsigned rows = 1) {
    gridDim = {blocks, rows, 1};
    body = kernel;
    for (unsigned b = 0; b < blocks * rows; ++b) {
        blockIdx = {b % blocks, b / blocks, 0};
        for (int i = 0; i < 32; ++i) {
            fiber_t& fiber = fibers[i];
            if (!fiber.context.uc_stack.ss_sp) getcontext(&fiber.context);  // a system call
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, (void (*)())enter, 1, i);
            fiber.started = fiber.ended = false;
            fiber.meetings = 0;
        }
        for (int running = 32; running;) {
            for (int i = 0; i < 32; ++i) {
                threadIdx = {(unsigned)i, 0, 0};
                resume(fibers[i]);
            }
            running = 0;
            for (const fiber_t& fiber : fibers) running += !fiber.ended;
            if (running && running < 32) {
                fprintf(stderr, "%d of 32 threads have ended, and the others wait for them\n", 32 - running);
                abort();
            }
        }
    }
}
