// layout.cuh: where the operands of a tensor kernel lie in shared memory, and the order in which tiles are computed.
// Plain arithmetic without any device code, so that g++ compiles it too and a test can check it.
//
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
#pragma once

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

// Tiles are taken in groups of `group` rows of tiles, column by column within a group: blocks that run at the same time
// then share rows of A and columns of B in the L2 cache.
struct tile_position {
    unsigned row, column;
};
constexpr tile_position tile_at(unsigned index, unsigned rows, unsigned columns, unsigned group) {
    const unsigned first = index / (group * columns) * group;
    const unsigned height = rows - first < group ? rows - first : group;
    const unsigned within = index - first * columns;
    return {first + within % height, within / height};
}
