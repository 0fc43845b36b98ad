// check_sums: computes the checksums with which products are verified, from data in device memory
// (planning/device_memory.py describes their memory layout).
//
// A panel is the part of op(A) or op(B) that one step multiplies. It has `extent` rows of op(A), or columns
// of op(B), and `depth` elements along k. A strip is some rows of a tile of C. Panels are cut into blocks of
// rows (or columns), strips into blocks of rows and columns. s is an index along `extent`, d along `depth` or
// along the columns of a strip. x(s, d) is an element, and sign() is a random sign. There are three kernels:
//
//   check_panel    adds up the rows of each block: sums[block][d] = sum over s of sign(s) x(s, d). Also one
//                  norm per block and SIDE values of d, and a flag per row s with nonfinite elements.
//   check_strip    adds up the elements of each block: sums[block of rows][block of columns] = sum over s and
//                  d of sign(s) sign(d) x(s, d). Also a norm per block, and flags as above.
//   check_product  multiplies the sums of two panels, which gives sums of their product:
//                  product[i][j] += sum over d of a.sums[i][d] b.sums[j][d]. Multiplies the norms, merges the
//                  flags, and compares the digests of the panels with the expected ones.
//
// check_panel and check_strip also compute a digest (a hash) of the data. The digest is the sum, modulo 2^32
// and in any order, over rows r of the stored matrix and words j of a row, of
//
//   weight(0, r) weight(1, j) word(r, j)
//
// It covers every 64th row of a panel, and all rows of a strip. A row is read as big-endian words of 4 bytes,
// the last one padded with zeros. Weights are odd. If two matrices differ only in signs and exponents, the
// byte order makes the low bits of words differ. A multiplication modulo 2^32 by an odd weight keeps such a
// difference, whereas it may lose one in the high bits.
//
// Sums are in double precision and always in the same order. Large, medium and small values have an
// accumulator each for their squares (Blue, 1978), so that squares neither overflow nor underflow.
//
// Macros
//   OOC_STORED   the type of the elements
//   OOC_AXIS     0: s is a row of the stored matrix (always for check_strip); 1: s is a column
//   OOC_WIDE     the type of the sums: double or complex_t<double>
// Launch: blocks of 256 threads.
//   check_panel     blockIdx.x selects SIDE values of d, blockIdx.y a block of rows
//   check_strip     blockIdx.x selects a block of columns, blockIdx.y a block of rows
//   check_product   blockIdx.x and blockIdx.y each select 16 blocks, of columns and of rows
#include "common/scalar.cuh"

using word = unsigned long long;
constexpr int SIDE = 128, DIGESTED = 64, THREADS = 256, ACROSS = 32, LANES = THREADS / ACROSS;

template <typename T> struct parts_of { static constexpr int count = 1; using real = T; };
template <typename Real> struct parts_of<complex_t<Real>> { static constexpr int count = 2; using real = Real; };
using real = parts_of<OOC_STORED>::real;
constexpr int PARTS = parts_of<OOC_STORED>::count;
constexpr int WORDS = sizeof(OOC_STORED) < 4 ? 1 : sizeof(OOC_STORED) / 4;  // words of 4 bytes per element; a 2-byte element is half a word

struct cut {
    long long extent, strip, size;
    int per;
    __device__ long long begin(int block) const { return block / per * strip + block % per * size; }
    __device__ long long end(int block) const {
        const long long own = begin(block) + size, of_strip = (block / per + 1) * strip;
        const long long e = own < of_strip ? own : of_strip;
        return e < extent ? e : extent;
    }
};

struct summed {
    const OOC_STORED* x;
    word* head;                      // may be null, as flags
    unsigned char* flags;
    double* norms;
    OOC_WIDE* sums;
    cut rows, cols;                  // blocks of rows and columns; a panel has no cols
    long long depth, pitch;          // elements along k (panels only); elements between stored rows
    long long sums_pitch;            // strips only: sums from one row of blocks to the next
    long long first_row, first_col;  // of C, of the first s and d: they index the random signs
    int row_signs, col_signs, conjugates;
};

struct multiplied {
    const OOC_WIDE *a, *b;
    const double *a_norms, *b_norms;
    const word *a_head, *b_head;
    word a_expected, b_expected;  // expected digests of the panels
    const unsigned char *a_flags, *b_flags;
    unsigned char* strips;  // the checksums of the first strip; those of the others follow
    // Bytes of the checksums of a strip, and byte offsets of their parts.
    long long strip_bytes, made, sums, norms, row_flags, col_flags;
    long long depth, chunks, rows, cols, strip;
    int down, across, pitch, per, first;
};

__device__ inline word random_word(word stream, word index) {
    word z = ((stream << 48) + index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
__device__ inline double random_sign(int stream, long long index) { return random_word(stream, index) >> 63 ? -1.0 : 1.0; }
__device__ inline unsigned weight(int stream, long long index) { return static_cast<unsigned>(random_word(stream, index) >> 32) | 1; }
__device__ inline unsigned row_weight(long long row, int every) { return row % every == 0 ? weight(0, row) : 0; }
// The weight, in the digest, of word w of an element of a row. Two 2-byte elements share a word: the weight
// is shifted to the half of the word that the element is in.
__device__ inline unsigned element_weight(long long element, int w) {
    return sizeof(OOC_STORED) < 4 ? weight(1, element / 2) << (element % 2 ? 0 : 16) : weight(1, element * WORDS + w);
}
__device__ inline unsigned swapped(const OOC_STORED& x, int w) {
    if (sizeof(OOC_STORED) < 4) {
        const unsigned half = *reinterpret_cast<const unsigned short*>(&x);
        return (half >> 8 | half << 8) & 0xffff;
    }
    unsigned found;
    memcpy(&found, reinterpret_cast<const char*>(&x) + 4 * w, 4);
    return __byte_perm(found, 0, 0x0123);
}

__device__ inline bool is_finite(double x) { return x - x == 0; }

// Computes a sum of squares without overflow or underflow.
struct squares {
    double large = 0, middle = 0, small = 0;
    __device__ void add(double v) {
        v = fabs(v);
        if (sizeof(real) < 8 || (v <= 0x1p480 && v >= 0x1p-480) || v == 0) {
            middle += v * v;
        } else if (v < 0x1p-480) {
            small += v * 0x1p600 * (v * 0x1p600);
        } else {  // NaN included
            large += v * 0x1p-600 * (v * 0x1p-600);
        }
    }
    // The square root of the sum. If `large` is not 0, `small` is less than 2^-80 of the sum and is omitted.
    __device__ double norm() const {
        if (large != 0) return sqrt(large + middle * 0x1p-600 * 0x1p-600) * 0x1p600;
        return middle != 0 ? sqrt(middle + small * 0x1p-600 * 0x1p-600) : sqrt(small) * 0x1p-600;
    }
};

// Adds up one value per thread, always in the same order, and returns the sum to all threads of the block.
template <typename T>
__device__ T total(T value, T* room) {
    __syncthreads();
    room[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) room[threadIdx.x] += room[threadIdx.x + half];
    }
    __syncthreads();
    return room[0];
}

__device__ inline double number(const OOC_STORED* x, int part) {
    return static_cast<double>(widen(reinterpret_cast<const real*>(x)[part]));
}

__shared__ double signs_of[SIDE];
__shared__ unsigned weights_of[SIDE][OOC_AXIS ? WORDS : 1];
__shared__ double partial[THREADS * PARTS];
__shared__ unsigned digests[THREADS];

// Sums one block: s from top to bottom - 1, d from left to right - 1, at most SIDE values each. For each d,
// this thread adds up some of the s and passes its partial sum to store(i, lane, d, sum). Every `every`-th
// row of the stored matrix goes into the digest. Returns the norm of the block to all threads.
template <typename Store>
__device__ inline double take(const summed& p, long long top, long long bottom, long long left, long long right, int every,
                              Store store) {
    const int size = static_cast<int>(bottom - top);
    for (int s = threadIdx.x; s < size; s += THREADS) {
        signs_of[s] = random_sign(p.row_signs, p.first_row + top + s);
        if (OOC_AXIS == 0) {
            weights_of[s][0] = row_weight(top + s, every);
        } else {
#pragma unroll
            for (int w = 0; w < WORDS; ++w) weights_of[s][OOC_AXIS * w] = element_weight(top + s, w);
        }
    }
    __syncthreads();
    // Threads are assigned to elements so that the reads of a warp are coalesced, whichever axis is
    // contiguous.
    const int i = OOC_AXIS == 0 ? threadIdx.x % ACROSS : threadIdx.x / LANES;
    const int lane = OOC_AXIS == 0 ? threadIdx.x / ACROSS : threadIdx.x % LANES;
    const auto place = [&](int s, long long d) { return p.x + (OOC_AXIS == 0 ? (top + s) * p.pitch + d : d * p.pitch + top + s); };
    squares square;
    unsigned digest = 0;
    for (long long d = left + i; d - i < right; d += ACROSS) {  // the same number of iterations for all threads
        double sum[PARTS] = {};
        unsigned weighted[WORDS] = {};
        if (d < right) {
#pragma unroll 8
            for (int s = lane; s < size; s += LANES) {
                const OOC_STORED x = *place(s, d);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const double value = number(&x, part);
                    sum[part] += signs_of[s] * value;
                    square.add(value);
                }
#pragma unroll
                for (int w = 0; w < WORDS; ++w) weighted[w] += weights_of[s][OOC_AXIS * w] * swapped(x, w);
            }
#pragma unroll
            for (int w = 0; w < WORDS; ++w) digest += weighted[w] * (OOC_AXIS == 0 ? element_weight(d, w) : row_weight(d, every));
        }
        store(i, lane, d, sum);
    }
    const double norm = squares{total(square.large, partial), total(square.middle, partial), total(square.small, partial)}.norm();
    digest = total(digest, digests);
    if (threadIdx.x == 0 && p.head != nullptr) atomicAdd(reinterpret_cast<unsigned*>(p.head), digest);
    if (!is_finite(norm) && p.flags != nullptr) {
        for (long long d = left + i; d < right; d += ACROSS)
            for (int s = lane; s < size; s += LANES) {
                bool all_finite = true;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) all_finite = all_finite && is_finite(number(place(s, d), part));
                if (!all_finite) {
                    p.flags[top + s] = 1;
                    p.head[1] = 1;
                }
            }
    }
    return norm;
}

__device__ inline OOC_WIDE wide(const double* sum, bool conjugates) {
    OOC_WIDE made;
    double* to = reinterpret_cast<double*>(&made);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) to[part] = part && conjugates ? -sum[part] : sum[part];
    return made;
}

extern "C" __global__ void __launch_bounds__(THREADS) check_panel(summed p) {
    const long long top = p.rows.begin(blockIdx.y), left = static_cast<long long>(blockIdx.x) * SIDE;
    const long long right = left + SIDE < p.depth ? left + SIDE : p.depth;
    const double norm = take(p, top, p.rows.end(blockIdx.y), left, right, DIGESTED, [&](int i, int lane, long long d, const double* sum) {
        __syncthreads();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) partial[(lane * ACROSS + i) * PARTS + part] = sum[part];
        __syncthreads();
        if (threadIdx.x >= ACROSS) return;
        const long long to = d - i + threadIdx.x;
        if (to >= right) return;
        double all[PARTS] = {};
        for (int l = 0; l < LANES; ++l)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) all[part] += partial[(l * ACROSS + threadIdx.x) * PARTS + part];
        p.sums[blockIdx.y * p.depth + to] = wide(all, p.conjugates);
    });
    if (threadIdx.x == 0) p.norms[static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x] = norm;
}

extern "C" __global__ void __launch_bounds__(THREADS) check_strip(summed p) {
    double all[PARTS] = {};
    const double norm = take(p, p.rows.begin(blockIdx.y), p.rows.end(blockIdx.y), p.cols.begin(blockIdx.x), p.cols.end(blockIdx.x), 1,
                             [&](int, int, long long d, const double* sum) {
                                 const double sign = random_sign(p.col_signs, p.first_col + d);
#pragma unroll
                                 for (int part = 0; part < PARTS; ++part) all[part] += sign * sum[part];
                             });
#pragma unroll
    for (int part = 0; part < PARTS; ++part) all[part] = total(all[part], partial);
    if (threadIdx.x > 0) return;
    const long long at = blockIdx.y * p.sums_pitch + blockIdx.x;
    p.sums[at] = wide(all, p.conjugates);
    p.norms[at] = norm;
}

// Returns the norm of a block of rows from the norms of its parts along the depth. It divides by the largest
// norm first, so that squares neither overflow nor underflow.
__device__ inline double whole_norm(const double* norms, long long count) {
    double largest = 0, sum = 0;
    for (long long c = 0; c < count; ++c) largest = norms[c] > largest || norms[c] != norms[c] ? norms[c] : largest;
    if (largest == 0 || !is_finite(largest)) return largest;
    for (long long c = 0; c < count; ++c) sum += norms[c] / largest * (norms[c] / largest);
    return largest * sqrt(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) check_product(multiplied p) {
    constexpr int TILE = 16, DEEP = 32;
    __shared__ OOC_WIDE a[TILE][DEEP + 1], b[TILE][DEEP + 1];
    __shared__ double a_norm[TILE], b_norm[TILE];
    const int row = threadIdx.x / TILE, col = threadIdx.x % TILE, top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const int i = top + row, j = left + col;
    if (threadIdx.x < TILE && top + threadIdx.x < p.down)
        a_norm[threadIdx.x] = whole_norm(p.a_norms + (top + threadIdx.x) * p.chunks, p.chunks);
    else if (threadIdx.x >= TILE && threadIdx.x < 2 * TILE && left + threadIdx.x - TILE < p.across)
        b_norm[threadIdx.x - TILE] = whole_norm(p.b_norms + (left + threadIdx.x - TILE) * p.chunks, p.chunks);
    OOC_WIDE sum = make_scalar<OOC_WIDE>::of(0, 0);
    for (long long d0 = 0; d0 < p.depth; d0 += DEEP) {
        __syncthreads();
        for (int e = threadIdx.x; e < TILE * DEEP; e += THREADS) {
            const int of = e / DEEP, d = e % DEEP;
            const bool inside = d0 + d < p.depth;
            a[of][d] = inside && top + of < p.down ? p.a[(top + of) * p.depth + d0 + d] : make_scalar<OOC_WIDE>::of(0, 0);
            b[of][d] = inside && left + of < p.across ? p.b[(left + of) * p.depth + d0 + d] : make_scalar<OOC_WIDE>::of(0, 0);
        }
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < DEEP; ++d) sum = multiply_add(a[row][d], b[col][d], sum);
    }
    __syncthreads();
    if (i < p.down && j < p.across) {
        unsigned char* to = p.strips + i / p.per * p.strip_bytes;
        const long long at = static_cast<long long>(i % p.per) * p.pitch + j;
        OOC_WIDE* product = reinterpret_cast<OOC_WIDE*>(to + p.sums) + at;
        double* norm = reinterpret_cast<double*>(to + p.norms) + at;
        const OOC_WIDE one = make_scalar<OOC_WIDE>::of(1, 0);
        const double more = p.depth > 0 ? a_norm[row] * b_norm[col] : 0;
        *product = p.first ? sum : multiply_add(one, *product, sum);
        *norm = p.first ? more : *norm + more;
    }
    // Set the flags of rows and columns with nonfinite elements: a byte per row, and a byte per column of
    // each strip. Few panels have nonfinite elements, so this is usually skipped.
    const bool nonfinite_a = p.depth > 0 && p.a_head[1] != 0, nonfinite_b = p.depth > 0 && p.b_head[1] != 0;
    const word damaged = p.depth > 0 && (p.a_head[0] != p.a_expected || p.b_head[0] != p.b_expected);
    const long long strips = (p.rows + p.strip - 1) / p.strip, threads = static_cast<long long>(gridDim.x) * gridDim.y * THREADS;
    const long long self = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
    if (p.first || nonfinite_a)
        for (long long r = self; r < p.rows; r += threads) {
            unsigned char* flag = p.strips + r / p.strip * p.strip_bytes + p.row_flags + r % p.strip;
            *flag = (p.first ? 0 : *flag) | (nonfinite_a ? p.a_flags[r] : 0);
        }
    if (p.first || nonfinite_b)
        for (long long c = self; c < strips * p.cols; c += threads) {
            unsigned char* flag = p.strips + c / p.cols * p.strip_bytes + p.col_flags + c % p.cols;
            *flag = (p.first ? 0 : *flag) | (nonfinite_b ? p.b_flags[c % p.cols] : 0);
        }
    for (long long strip = self; strip < strips; strip += threads) {
        word* head = reinterpret_cast<word*>(p.strips + strip * p.strip_bytes + p.made);
        head[0] = (p.first ? 0 : head[0]) | damaged;
    }
}
