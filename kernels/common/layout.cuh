// layout.cuh: layouts of operands in shared memory, and the order of the tiles of C, as pure functions. g++
// compiles this header too, so a test can check that each layout is one to one and free of bank conflicts.
//
// k is the index of the sum; mn is a row of op(A) or a column of op(B). A warp reads 16-byte chunks eight
// lanes at a time. These eight accesses are free of conflicts if they fall into different eighths of the 128
// bytes that the 32 banks span.
//
//   section   content                                               used by
//   tiles     the order of tiles                                    all fast kernels
//   panels    layouts for multiply-adds and fp64 tensor cores       simt, tensor_f64
//   slabs     128-byte swizzled layouts                             tensor_wgmma, tensor_mma, tensor_f64_tma, ozaki_multiply
#pragma once

// --- tiles -------------------------------------------------------------------------------------------------

// Tiles are computed in groups of `group` rows of tiles, column by column within a group. The tiles in flight
// then form nearly a square and share rows of A and columns of B in the L2 cache. 2^31 tiles would not fit
// any memory, so 32 bits suffice.
struct tile_position {
    unsigned row, column;
};
constexpr tile_position tile_at(unsigned index, unsigned rows, unsigned columns, unsigned group) {
    const unsigned first = index / (group * columns) * group;
    const unsigned height = rows - first < group ? rows - first : group;
    const unsigned within = index - first * columns;
    return {first + within % height, within / height};
}

constexpr int at_most(long long x, int limit) { return x < limit ? static_cast<int>(x) : limit; }
constexpr unsigned tiles_along(long long extent, int tile) { return static_cast<unsigned>((extent + tile - 1) / tile); }

struct tile_corner {
    long long top, left;
};
constexpr tile_corner corner_of(unsigned index, long long m, long long n, int block_m, int block_n, int group) {
    const tile_position at = tile_at(index, tiles_along(m, block_m), tiles_along(n, block_n), group);
    return {static_cast<long long>(at.row) * block_m, static_cast<long long>(at.column) * block_n};
}

// --- panels, all offsets in bytes --------------------------------------------------------------------------

// fp64 tensor panel with k contiguous: rows of `depth` values (a multiple of 16). Eight lanes read chunks t =
// 0..3 of one half of k, in two rows whose numbers differ in bit 1. That bit is xored into bit 2 of the chunk
// number.
constexpr unsigned k_rows_offset(int mn, int k, int depth) {
    return static_cast<unsigned>(mn * depth * 8 + ((k * 8) ^ (((mn >> 1) & 1) << 6)));
}

// fp64 tensor panel with mn contiguous: rows of `width` values (a multiple of 16). Eight lanes read two
// neighbouring chunks of each of the four rows k = 0, 2, 4, 6 (or 1, 3, 5, 7). Bits 1 and 2 of k are xored
// into bits 1 and 2 of the chunk number.
constexpr unsigned mn_rows_offset(int mn, int k, int width) {
    return static_cast<unsigned>(k * width * 8 + ((mn * 8) ^ (((k >> 1) & 3) << 5)));
}

// Row pitch of a simt panel, which always has mn contiguous: one chunk of padding per row. A panel that is
// stored with k contiguous is transposed while it is copied, value by value: a warp writes eight k by four
// mn, each to its own bank.
constexpr int simt_pitch(int width, int size) { return width * size + 16; }

// The position of a lane in a simt warp of `lanes_m` rows by 32 / lanes_m columns of chunks. Bit 0 of the
// lane selects the row and bit 1 the column. Neighbours (lane ^ 1 or lane ^ 2) then read the same chunk,
// which halves the passes through shared memory.
constexpr int lane_column(int lane, int lanes_m) { return (lane >> 1) % (32 / lanes_m); }
constexpr int lane_row(int lane, int lanes_m) { return (lane & 1) + 2 * ((lane >> 1) / (32 / lanes_m)); }

// --- slabs -------------------------------------------------------------------------------------------------

// In shared memory every operand consists of *slabs*. A slab is a sequence of rows of 128 bytes. Chunk c (16
// bytes) of row r is stored in place c ^ (r % 8), so that eight rows of one column of chunks are in different
// banks:
//
//      row 0   0 1 2 3 4 5 6 7
//      row 1   1 0 3 2 5 4 7 6         (the 128-byte swizzle of TMA and of wgmma;
//      row 2   2 3 0 1 6 7 4 5          a slab begins at a multiple of 1024 bytes)
//      ...
//
// A k-block has as many k as fit 128 bytes: 64 elements of 16 bits, 32 of 32 bits. The part of an operand
// with X rows (or columns) of C and one k-block is
//   if it is K-major (contiguous along k):    one slab of X rows, each row along k;
//   otherwise (contiguous along mn):          X / depth slabs of `depth` rows, each row along mn.

constexpr int ROW_BYTES = 128;

// Byte offset in a slab of byte `byte` (0 to 127) of row `row`.
constexpr int swizzled(int row, int byte) { return row * ROW_BYTES + (byte ^ (row % 8) * 16); }

// Byte offset of element (x, k) in an operand's slabs: x is the row or column of C, k the index in the
// k-block.
constexpr int element_offset(bool k_major, int x, int k, int item) {
    const int depth = ROW_BYTES / item;
    return k_major ? swizzled(x, k * item) : swizzled(x / depth * depth + k, x % depth * item);
}

// A wgmma matrix descriptor of an operand in slabs. Bits 0-13: address / 16. Bits 16-29: (bytes from one slab
// to the next along mn) / 16, if not K-major. Bits 32-45: (bytes from eight rows of a slab to the next eight)
// / 16. Bits 62-63: 1, the 128-byte swizzle. The bits of a shared-memory address above bit 17 number the
// block of the cluster; they are masked off.
constexpr unsigned long long slab_descriptor(unsigned address, bool k_major, int depth) {
    const unsigned long long leading = k_major ? 1 : depth * ROW_BYTES / 16, stride = 8 * ROW_BYTES / 16;
    return (address & 0x3ffff) >> 4 | leading << 16 | stride << 32 | 1ull << 62;
}

// Bytes from one k-step of a wgmma (32 bytes of k) to the next in a k-block.
constexpr int step_bytes(bool k_major, int item) { return k_major ? 32 : 32 / item * ROW_BYTES; }
