// layout.cuh: layouts of operands in shared memory, and the order of the tiles of C, as pure functions. g++
// compiles this header too, so a test can check that each layout is one to one and free of bank conflicts.
//
// In C = sum over k of op(A) op(B), k is the index of the sum. mn is the other index of an operand: a row of
// op(A) or a column of op(B). If each lane of a warp reads 16 bytes (a chunk), the hardware serves eight
// lanes at a time. The 32 banks are 128 bytes wide, that is, eight chunks. So there is no conflict if the
// eight lanes read from different eighths of these 128 bytes.
//
//   section   content                                             used by
//   tiles     the order of tiles                                  all fast kernels
//   panels    layouts for multiply-adds and fp64 tensor cores     simt, tensor_f64
//   slabs     128-byte swizzled layouts                           tensor_wgmma, tensor_mma, tensor_f64_tma,
//                                                                 ozaki_multiply
#pragma once

// --- tiles -------------------------------------------------------------------------------------------------

// The position of tile number `index`. Tiles are numbered in bands of `group` rows of tiles, and column by
// column within a band. So the tiles that the GPU computes at the same time form nearly a square, and share
// rows of A and columns of B in the L2 cache. A matrix of 2^31 tiles would not fit any memory, so 32 bits are
// enough.
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

// The offset of element (mn, k) in a panel for fp64 tensor cores, if k is contiguous. A panel is the part of
// an operand that a block multiplies at a time. It has rows of `depth` values, a multiple of 16. Eight lanes
// read four neighbouring chunks in each of two rows. Bit 1 of the row number differs between the two rows. It
// is xored into bit 2 of the chunk number, so that the eight chunks are in different banks.
constexpr unsigned k_rows_offset(int mn, int k, int depth) {
    return static_cast<unsigned>(mn * depth * 8 + ((k * 8) ^ (((mn >> 1) & 1) << 6)));
}

// The offset of element (mn, k) in a panel for fp64 tensor cores, if mn is contiguous. A panel is the part of
// an operand that a block multiplies at a time. It has rows of `width` values, a multiple of 16. Eight lanes
// read two neighbouring chunks in each of four rows, k = 0, 2, 4, 6 (or 1, 3, 5, 7). Bits 1 and 2 of k are
// xored into bits 1 and 2 of the chunk number, so that the eight chunks are in different banks.
constexpr unsigned mn_rows_offset(int mn, int k, int width) {
    return static_cast<unsigned>(k * width * 8 + ((mn * 8) ^ (((k >> 1) & 3) << 5)));
}

// Bytes from one row to the next in a panel of the kernel simt. A panel is the part of an operand that a
// block multiplies at a time; here its rows are contiguous along mn. If the operand is contiguous along k in
// device memory, copying transposes it: a warp writes 8 positions along k by 4 along mn, value by value. The
// 16 bytes of padding per row put these values into different banks.
constexpr int simt_pitch(int width, int size) { return width * size + 16; }

// The position of a lane in a warp of the kernel simt. The lanes form `lanes_m` rows and 32 / lanes_m
// columns. Lanes in a row read the same chunk of A, lanes in a column the same chunk of B. Bit 0 of the lane
// number selects between two rows, bit 1 between two columns. So lane ^ 1 or lane ^ 2 reads the same chunk,
// which halves the passes through shared memory.
constexpr int lane_column(int lane, int lanes_m) { return (lane >> 1) % (32 / lanes_m); }
constexpr int lane_row(int lane, int lanes_m) { return (lane & 1) + 2 * ((lane >> 1) / (32 / lanes_m)); }

// --- slabs -------------------------------------------------------------------------------------------------

// A *slab* is a sequence of rows of 128 bytes in shared memory, in the 128-byte swizzle of TMA and of wgmma.
// A row has eight chunks of 16 bytes. Chunk c of row r is stored at place c ^ (r % 8). So the same chunk of
// eight consecutive rows is in different banks. A slab begins at a multiple of 1024 bytes.
//
//      place   0 1 2 3 4 5 6 7
//      row 0   0 1 2 3 4 5 6 7         (the number of the chunk that is stored there)
//      row 1   1 0 3 2 5 4 7 6
//      row 2   2 3 0 1 6 7 4 5
//      ...
//
// A *k-block* is as many elements along k as fit 128 bytes: 64 elements of 16 bits, or 32 of 32 bits. Let
// this number be `depth`. In shared memory, X rows of op(A) (or columns of op(B)) by one k-block are
//   if the operand is K-major (contiguous along k):   one slab of X rows, each row along k;
//   otherwise (contiguous along mn):                  X / depth slabs of `depth` rows, each row along mn.

constexpr int ROW_BYTES = 128;

// Where byte `byte` (0 to 127) of row `row` is stored: its byte offset in the slab.
constexpr int swizzled(int row, int byte) { return row * ROW_BYTES + (byte ^ (row % 8) * 16); }

// The byte offset of element (x, k) in the slabs of an operand. x is a row of op(A) or a column of op(B),
// counted from the first one in shared memory. k counts from the start of the k-block. `item` is the size of
// an element in bytes.
constexpr int element_offset(bool k_major, int x, int k, int item) {
    const int depth = ROW_BYTES / item;
    return k_major ? swizzled(x, k * item) : swizzled(x / depth * depth + k, x % depth * item);
}

// The matrix descriptor by which wgmma finds an operand in slabs:
//
//   bits 0-13    address / 16
//   bits 16-29   bytes from one slab to the next, along mn, / 16; ignored if the operand is K-major
//   bits 32-45   bytes from eight rows of a slab to the next eight rows, / 16
//   bits 62-63   1, which means the 128-byte swizzle
//
// Bits 18 and above of a shared-memory address are the number of the block in its cluster. They are masked
// off, because the descriptor has no room for them.
constexpr unsigned long long slab_descriptor(unsigned address, bool k_major, int depth) {
    const unsigned long long leading = k_major ? 1 : depth * ROW_BYTES / 16, stride = 8 * ROW_BYTES / 16;
    return (address & 0x3ffff) >> 4 | leading << 16 | stride << 32 | 1ull << 62;
}

// Bytes between two consecutive k-steps of a k-block. A k-step is the 32 bytes along k that one wgmma covers.
constexpr int step_bytes(bool k_major, int item) { return k_major ? 32 : 32 / item * ROW_BYTES; }
