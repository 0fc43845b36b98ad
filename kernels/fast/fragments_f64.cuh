// fragments_f64.cuh: loads the fragments of fp64 mma.m16n8k8 from slabs in shared memory, and writes its sums
// to C. A slab is a swizzled block of an operand (layout.cuh), here of 16 by 16 values or 2048 bytes.
//
// The instruction multiplies X (16 rows) by Y (8 columns) over 8 indices k. Which rows, columns and k of the
// matrices these are may be chosen freely, as long as X and Y have the same k. The choice here makes reads
// free of bank conflicts and gives a lane sums that are pairs along a row of C. Lane (g, t) = (lane / 4,
// lane % 4) loads four values at a time, a quad: of 16 rows of X and 8 indices k, or of 16 columns of Y (two
// instructions, j = 0 and 1) and 8 indices k:
//
//         in the instruction          in the matrix
//   X     rows g and g + 8            rows 2 g and 2 g + 1
//   Y     column g, instruction j     column 2 s(g) + j, where s(g) is g with its two low bits swapped;
//                                     8 j + g if Y is contiguous along its columns
//   k     t and t + 4                 2 t and 2 t + 1; t and t + 4 if X is contiguous along k
//
// If B is used as stored, X is B and the kernel computes C^T = B^T A^T. Otherwise X is A. If A and B are both
// used as stored, or both transposed, X is contiguous along its rows and Y along k, and a lane reads 16 bytes
// at a time. Otherwise it reads one or both of them 8 bytes at a time, because the instruction takes X row by
// row and Y k by k in consecutive registers.
//
// Within a slab, the offset of each read is a fixed offset of the lane with some bits xored, plus a constant.
#pragma once

constexpr bool SWAP = OOC_OP_B == 0;  // the kernel computes C^T, and X is B
constexpr bool A_K = OOC_OP_A == 0, B_K = OOC_OP_B != 0;  // whether the operand is contiguous along k
constexpr bool X_K = SWAP ? B_K : A_K, Y_K = SWAP ? A_K : B_K;
constexpr int SLAB = 2048;

struct quad {
    double at[2][2];  // X: [k][row], Y: [column][k]
};
struct alignas(16) pair {
    double x[2];
};

// The byte offset of this lane's first value in a slab of X, and in a slab of Y.
__device__ inline unsigned x_lane() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return element_offset(X_K, 2 * g, X_K ? t : 2 * t, 8);
}
__device__ inline unsigned y_lane() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column = Y_K ? 2 * ((g & 1) << 1 | (g >> 1 & 1) | (g & 4)) : g;
    return element_offset(Y_K, column, X_K ? t : 2 * t, 8);
}

__device__ inline void read_pair(double (&to)[2], unsigned from) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(to[0]), "=d"(to[1]) : "r"(from) : "memory");
}
__device__ inline void read_one(double& to, unsigned from) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(to) : "r"(from) : "memory");
}

// Reads a lane's four values of X (below, of Y) from a slab. The slab has 16 indices k; `half` selects 8 of
// them. `at` is the slab's address plus the lane's offset (x_lane or y_lane).
__device__ inline void read_x(quad& q, unsigned at, int half) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if constexpr (X_K) {
#pragma unroll
            for (int r = 0; r < 2; ++r) read_one(q.at[k][r], (at ^ (half * 64 + k * 32 + r * 16)) + r * 128);
        } else {
            read_pair(q.at[k], (at ^ k * 16) + k * 128 + half * 1024);
        }
}
__device__ inline void read_y(quad& q, unsigned at, int half) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
        if constexpr (!Y_K) {
#pragma unroll
            for (int k = 0; k < 2; ++k) read_one(q.at[j][k], (at ^ (j * 64 + k * 16)) + k * 128 + half * 1024);
        } else if constexpr (X_K) {
#pragma unroll
            for (int k = 0; k < 2; ++k) read_one(q.at[j][k], (at ^ (half * 64 + k * 32 + j * 16)) + j * 128);
        } else {
            read_pair(q.at[j], (at ^ (half * 64 + j * 16)) + j * 128);
        }
}

// Adds the product of 16 rows of X and 8 columns of Y, over 8 indices k, to the sums. y has 16 columns; j
// selects 8 of them.
__device__ inline void multiply(double (&sums)[4], const quad& x, const quad& y, int j) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(x.at[0][0]), "d"(x.at[0][1]), "d"(x.at[1][0]), "d"(x.at[1][1]), "d"(y.at[j][0]), "d"(y.at[j][1]));
}

// Loads two neighbours in a row of C. Only the first `left` of them are inside C; both are if WHOLE. `wide`:
// they are aligned to 16 bytes.
template <bool WHOLE>
__device__ inline pair load_pair(const double* from, int left, bool wide) {
    if (WHOLE || (wide && left >= 2)) return *reinterpret_cast<const pair*>(from);
    return {left >= 1 ? from[0] : 0, left >= 2 ? from[1] : 0};
}
template <bool WHOLE>
__device__ inline void store_pair(double* to, pair values, int left, bool wide) {
    if (WHOLE || (wide && left >= 2)) {
        *reinterpret_cast<pair*>(to) = values;
    } else {
        if (left >= 1) to[0] = values.x[0];
        if (left >= 2) to[1] = values.x[1];
    }
}

// Writes a warp's sums to C. With g = lane / 4 and t = lane % 4, sums[i][2 p + j][2 r + s] belongs to
//
//   row     16 i + 2 g + r of X
//   column  16 p + 4 s + 2 (t % 2) + 8 (t / 2) + j of Y; 16 p + 8 j + 2 t + s if Y is contiguous along
//           columns
//
// `c` is the start of the warp's part of C, of which rows_left x columns_left elements are inside C. Sums are
// written in batches of four pairs. If beta != 0, the old C is loaded AHEAD batches before it is needed.
template <bool WHOLE, int GROUPS_X, int GROUPS_Y>
__device__ inline void write_sums(const double (&sums)[GROUPS_X][2 * GROUPS_Y][4], double* c, const gemm_arguments& g, int rows_left,
                                  int columns_left, bool wide) {
    constexpr int BATCHES = GROUPS_X * GROUPS_Y, INNER = SWAP ? GROUPS_X : GROUPS_Y, AHEAD = SWAP && Y_K ? 2 : 1;
    const int lane = threadIdx.x % 32, in_x = 2 * (lane / 4), t = lane % 4;
    const int in_y = Y_K ? 2 * (t % 2) + 8 * (t / 2) : 2 * t;
    c += (SWAP ? in_y : in_x) * g.ldc + (SWAP ? in_x : in_y);
    rows_left -= SWAP ? in_y : in_x;
    columns_left -= SWAP ? in_x : in_y;
    // Pair e of a batch is (j, s) if SWAP, else (r, s).
    const auto row_of = [&](int batch, int e) {
        return batch / INNER * 16 + (SWAP ? (Y_K ? e / 2 + 4 * (e % 2) : 8 * (e / 2) + e % 2) : e / 2);
    };
    const auto column_of = [&](int batch, int e) { return batch % INNER * 16 + (SWAP ? 0 : 4 * (e % 2)); };
    pair old[AHEAD + 1][4];
#pragma unroll
    for (int b = 0; b < BATCHES + AHEAD; ++b) {
        if (g.beta_re != 0 && b < BATCHES) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (WHOLE || row_of(b, e) < rows_left)
                    old[b % (AHEAD + 1)][e] = load_pair<WHOLE>(c + row_of(b, e) * g.ldc + column_of(b, e), columns_left - column_of(b, e), wide);
        }
        if (b >= AHEAD) {
            const int done = b - AHEAD, i = SWAP ? done % INNER : done / INNER, p = SWAP ? done / INNER : done % INNER;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int s = e % 2;
                pair values = SWAP ? pair{sums[i][2 * p + e / 2][s], sums[i][2 * p + e / 2][2 + s]}
                                     : pair{sums[i][2 * p][e / 2 * 2 + s], sums[i][2 * p + 1][e / 2 * 2 + s]};
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    values.x[v] *= g.alpha_re;
                    if (g.beta_re != 0) values.x[v] += g.beta_re * old[done % (AHEAD + 1)][e].x[v];
                }
                if (WHOLE || row_of(done, e) < rows_left)
                    store_pair<WHOLE>(c + row_of(done, e) * g.ldc + column_of(done, e), values, columns_left - column_of(done, e), wide);
            }
        }
    }
}
