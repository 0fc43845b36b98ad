// hopper.cuh: the sm_90a instructions that a GEMM kernel needs, one small function each. Addresses in shared
// memory are the 32-bit addresses of PTX's shared state space.
//
//   mbarriers    barriers in shared memory that count arriving threads and copied bytes. They are used again
//                and again, in phases; a thread waits for a phase by its parity, 0 or 1.
//   position     a position in a ring of buffers (stages): the stage, and the parity of the round
//   TMA          tma_copy_box copies one box of a matrix, which a tensor_map describes. The host encodes
//                tensor maps by cuTensorMapEncodeTiled.
//   wgmma        D += X Y by the 128 threads of a warpgroup, asynchronously. D is 64 x N, in registers. X has
//                64 rows, Y has N columns. One instruction covers 32 bytes along k, called a k-step.
//
// Macros for wgmma:
//   OOC_FORMAT         tf32 | f16 | bf16: sums are float32; s8: sums are int32
//   OOC_INTEGER_SUMS   must be defined for s8
//   MMA_N              N: 128 | 256
#pragma once

#include "common/ptx.cuh"

struct alignas(128) tensor_map {
    unsigned char opaque[128];
};

// --- mbarriers ---------------------------------------------------------------------------------------------

__device__ inline void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once, and lets the current phase also wait until TMA has copied `bytes` more bytes.
__device__ inline void mbarrier_expect_bytes(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the mbarrier at the same address in another block of the cluster.
__device__ inline void mbarrier_arrive_at(unsigned barrier, int block) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier), "r"(block) : "memory");
}
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "AGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

// A position in a ring of COUNT buffers, called stages.
template <int COUNT>
struct position {
    int stage = 0;
    unsigned phase = 0;  // parity of the number of rounds through the ring: mbarrier waits need it
    __device__ void advance(unsigned blocks) {
        stage += blocks % COUNT;
        phase ^= blocks / COUNT & 1;
        if (stage >= COUNT) {
            stage -= COUNT;
            phase ^= 1;
        }
    }
};

__device__ inline unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- TMA ---------------------------------------------------------------------------------------------------

// Copies the box whose first element is (x, y). x counts along the contiguous dimension. The mbarrier counts
// the bytes that have been copied.
__device__ inline void tma_copy_box(const tensor_map& map, unsigned to, unsigned barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                     "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}
// Copies a box to several blocks of the cluster by multicast: to the same shared-memory address in each block
// whose bit is set in `blocks`. The mbarrier of each of these blocks counts the bytes.
__device__ inline void tma_multicast_box(const tensor_map& map, unsigned to, unsigned barrier, int x, int y, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
                 : "memory");
}

// The same two copies for a three-dimensional tensor map, a stack of matrices. z is the number of the matrix.
__device__ inline void tma_copy_box(const tensor_map& map, unsigned to, unsigned barrier, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
                     "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                 : "memory");
}
__device__ inline void tma_multicast_box(const tensor_map& map, unsigned to, unsigned barrier, int x, int y, int z, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
                 : "memory");
}

// --- registers ---------------------------------------------------------------------------------------------

template <int COUNT>
__device__ inline void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ inline void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

#ifdef MMA_N

// --- wgmma -------------------------------------------------------------------------------------------------

// Makes wgmma instructions after it see the register writes before it.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups of wgmma instructions are unfinished.
template <int PENDING>
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

#ifdef OOC_INTEGER_SUMS
using wgmma_sum = int;
#define OOC_SUM "s32"
#define OOC_KEPT "+r"
#else
using wgmma_sum = float;
#define OOC_SUM "f32"
#define OOC_KEPT "+f"
#endif

// Operands of the asm statements below. A thread's MMA_N / 2 sums are operands %0, %1, and so on. OOC_P0 is
// the first operand after them, OOC_P1 the second, up to OOC_P5.
#define OOC_TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define OOC_4(d, i) OOC_KEPT(d[i]), OOC_KEPT(d[i + 1]), OOC_KEPT(d[i + 2]), OOC_KEPT(d[i + 3])
#define OOC_8(d, i) OOC_4(d, i), OOC_4(d, i + 4)
#define OOC_64(d, i) OOC_8(d, i), OOC_8(d, i + 8), OOC_8(d, i + 16), OOC_8(d, i + 24), OOC_8(d, i + 32), OOC_8(d, i + 40), OOC_8(d, i + 48), OOC_8(d, i + 56)
#define OOC_SIXTY OOC_TEN("") OOC_TEN("1") OOC_TEN("2") OOC_TEN("3") OOC_TEN("4") OOC_TEN("5")
#if MMA_N == 256
#define OOC_LIST "{" OOC_SIXTY OOC_TEN("6") OOC_TEN("7") OOC_TEN("8") OOC_TEN("9") OOC_TEN("10") OOC_TEN("11") "%120,%121,%122,%123,%124,%125,%126,%127}"
#define OOC_ACCUMULATORS(d) OOC_64(d, 0), OOC_64(d, 64)
#define OOC_P0 "%128"
#define OOC_P1 "%129"
#define OOC_P2 "%130"
#define OOC_P3 "%131"
#define OOC_P4 "%132"
#define OOC_P5 "%133"
#elif MMA_N == 128
#define OOC_LIST "{" OOC_SIXTY "%60,%61,%62,%63}"
#define OOC_ACCUMULATORS(d) OOC_64(d, 0)
#define OOC_P0 "%64"
#define OOC_P1 "%65"
#define OOC_P2 "%66"
#define OOC_P3 "%67"
#define OOC_P4 "%68"
#define OOC_P5 "%69"
#else
#error "MMA_N is 128 or 256: the operand lists of wgmma are written out for these"
#endif
#define OOC_WGMMA(k) "wgmma.mma_async.sync.aligned.m64n" OOC_TEXT(MMA_N) k "." OOC_SUM "." OOC_TEXT(OOC_FORMAT) "." OOC_TEXT(OOC_FORMAT) " " OOC_LIST

// wgmma on 16-bit operands, 16 elements along k. Each operand may be K-major (contiguous along k) or not. x
// and y are matrix descriptors. keep = 0 overwrites d instead of adding to it.
template <bool X_K_MAJOR, bool Y_K_MAJOR>
__device__ inline void wgmma_16bit(wgmma_sum (&d)[MMA_N / 2], unsigned long long x, unsigned long long y, int keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " OOC_P2 ", 0;\n"
                 OOC_WGMMA("k16") ", " OOC_P0 ", " OOC_P1 ", keep, 1, 1, " OOC_P3 ", " OOC_P4 ";\n}"
                 : OOC_ACCUMULATORS(d)
                 : "l"(x), "l"(y), "r"(keep), "n"(!X_K_MAJOR), "n"(!Y_K_MAJOR));
}
// wgmma on tf32 operands, 8 elements along k. Both operands must be K-major (contiguous along k).
__device__ inline void wgmma_tf32(wgmma_sum (&d)[MMA_N / 2], unsigned long long x, unsigned long long y, int keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " OOC_P2 ", 0;\n"
                 OOC_WGMMA("k8") ", " OOC_P0 ", " OOC_P1 ", keep, 1, 1;\n}"
                 : OOC_ACCUMULATORS(d)
                 : "l"(x), "l"(y), "r"(keep));
}
// wgmma on tf32 operands with X in registers, 8 elements along k. Lane 4 g + q of warp w has four elements of
// X: rows 16 w + g and 16 w + g + 8 of column q in x[0] and x[1], the same rows of column q + 4 in x[2] and
// x[3].
__device__ inline void wgmma_tf32(wgmma_sum (&d)[MMA_N / 2], const unsigned (&x)[4], unsigned long long y, int keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " OOC_P5 ", 0;\n"
                 OOC_WGMMA("k8") ", {" OOC_P0 ", " OOC_P1 ", " OOC_P2 ", " OOC_P3 "}, " OOC_P4 ", keep, 1, 1;\n}"
                 : OOC_ACCUMULATORS(d)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(keep));
}
// wgmma on int8 operands, 32 elements along k. Both operands must be K-major (contiguous along k).
__device__ inline void wgmma_8bit(wgmma_sum (&d)[MMA_N / 2], unsigned long long x, unsigned long long y, int keep) {
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " OOC_P2 ", 0;\n"
                 OOC_WGMMA("k32") ", " OOC_P0 ", " OOC_P1 ", keep;\n}"
                 : OOC_ACCUMULATORS(d)
                 : "l"(x), "l"(y), "r"(keep));
}

#endif
