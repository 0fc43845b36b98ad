// layout.cuh: where things lie, and the order in which tiles of C are computed, as pure functions. No device code, so that
// g++ compiles it too and a test can check that each map is one to one and free of bank conflicts.
//
// k runs along the product, mn along the rows of op(A) or the columns of op(B). Shared memory answers eight lanes at a time
// where each takes 16 bytes (a "chunk"); the eight must lie in different eighths of the 128 bytes that the 32 banks span.
//
//   tiles     the order of tiles                                       simt, tensor_f64, tensor_wgmma, tensor_mma
//   panels    of ordinary multiply-adds, and of fp64 tensor cores      simt, tensor_f64
//   slabs     of the tensor cores' shorter formats                     tensor_wgmma, tensor_mma
#pragma once

// --- tiles ------------------------------------------------------------------------------------------------------------

// Tiles are taken in groups of `group` rows of tiles, column by column within a group: those in flight at one time form a
// near square, whose rows of A and columns of B are shared in the L2 cache. 32 bits suffice: 2^31 tiles would not fit any memory.
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

// --- panels, all offsets in bytes -------------------------------------------------------------------------------------

// fp64 tensor panel with k contiguous: rows of `depth` values (a multiple of 16). Eight lanes read, for one k half of
// a row, chunks t = 0..3 of two rows that differ in bit 1: that bit flips bit 2 of the chunk.
constexpr unsigned k_rows_offset(int mn, int k, int depth) {
    return static_cast<unsigned>(mn * depth * 8 + ((k * 8) ^ (((mn >> 1) & 1) << 6)));
}

// fp64 tensor panel with mn contiguous: rows of `width` values (a multiple of 16). Eight lanes read two neighbouring
// chunks of each of four rows k = 0, 2, 4, 6 (or 1, 3, 5, 7): bits 1 and 2 of k flip bits 1 and 2 of the chunk.
constexpr unsigned mn_rows_offset(int mn, int k, int width) {
    return static_cast<unsigned>(k * width * 8 + ((mn * 8) ^ (((k >> 1) & 3) << 5)));
}

// simt panel: always mn contiguous. A row is one chunk longer than its values, so that a panel that comes k contiguous
// is turned while it is copied, value by value, eight k by four mn a warp, each to its own bank.
constexpr int simt_pitch(int width, int size) { return width * size + 16; }

// Lanes of a simt warp, `lanes_m` rows by 32 / lanes_m columns of chunks. The lowest bit goes to the row and the next
// to the column: a load that neighbours (lane ^ 1, or lane ^ 2) share takes half the passes through shared memory.
constexpr int lane_column(int lane, int lanes_m) { return (lane >> 1) % (32 / lanes_m); }
constexpr int lane_row(int lane, int lanes_m) { return (lane & 1) + 2 * ((lane >> 1) / (32 / lanes_m)); }

// --- slabs ------------------------------------------------------------------------------------------------------------

// In shared memory every operand is made of *slabs*. A slab is rows of 128 bytes, one below the other; the 16-byte
// chunk c of row r is held in place c ^ (r % 8), so that the eight rows of a column of chunks lie in different banks:
//
//      row 0   0 1 2 3 4 5 6 7
//      row 1   1 0 3 2 5 4 7 6         (the 128-byte swizzle of the tensor copy engine and of wgmma;
//      row 2   2 3 0 1 6 7 4 5          a slab begins at a multiple of 1024 bytes)
//      ...
//
// One k-block is as deep as 128 bytes hold: 64 elements of 16 bits, 32 of 32 bits. An operand of X rows (of C's rows or
// columns) by one k-block is
//   K-major, contiguous in memory along k:    one slab of X rows, each a run along k;
//   otherwise (contiguous along its rows):    X / depth slabs of `depth` rows, each row a run along X.

constexpr int ROW_BYTES = 128;

// Byte offset in a slab of byte `byte` (0 to 127) of row `row`.
constexpr int swizzled(int row, int byte) { return row * ROW_BYTES + (byte ^ (row % 8) * 16); }

// Byte offset in an operand's slabs of the element in row x of C's rows or columns, k-th of the k-block.
constexpr int element_offset(bool k_major, int x, int k, int item) {
    const int depth = ROW_BYTES / item;
    return k_major ? swizzled(x, k * item) : swizzled(x / depth * depth + k, x % depth * item);
}

// A wgmma descriptor of an operand in slabs. Bits 0-13: address / 16; bits 16-29: bytes / 16 from a slab to the next along
// the rows (not K-major only); bits 32-45: bytes / 16 from eight rows of the slab to the next eight; bits 62-63: 1 is the
// 128-byte swizzle. Above bit 17 an address of a cluster's shared memory names the block, which a descriptor must not hold.
constexpr unsigned long long slab_descriptor(unsigned address, bool k_major, int depth) {
    const unsigned long long leading = k_major ? 1 : depth * ROW_BYTES / 16, stride = 8 * ROW_BYTES / 16;
    return (address & 0x3ffff) >> 4 | leading << 16 | stride << 32 | 1ull << 62;
}

// Bytes from one k-step of a wgmma to the next in a k-block: a step is 32 bytes of k.
constexpr int step_bytes(bool k_major, int item) { return k_major ? 32 : 32 / item * ROW_BYTES; }
