// layout.cuh: where things lie, as pure functions. No CUDA, so that g++ compiles it and a CPU test can check that
// each map is one to one and free of bank conflicts.
//
// k runs along the product, mn along the rows of op(A) or the columns of op(B). All offsets are in bytes.
#pragma once

constexpr int at_most(long long x, int limit) { return x < limit ? static_cast<int>(x) : limit; }
constexpr unsigned tiles_along(long long extent, int tile) { return static_cast<unsigned>((extent + tile - 1) / tile); }

// The tile of C that comes `index`th. Tiles are taken in bands of `band` tile rows, down each column of a band first,
// so that the tiles in flight at one time form a near square, whose panels of A and B are shared in the L2 cache.
// 32 bits suffice: 2^31 tiles of C would not fit any memory.
struct tile_place {
    unsigned row, column;
};
constexpr tile_place tile_of(unsigned index, unsigned rows, unsigned columns, unsigned band) {
    const unsigned first = index / (band * columns) * band, within = index % (band * columns);
    const unsigned height = rows - first < band ? rows - first : band;
    return {first + within % height, within / height};
}
struct tile_corner {
    long long top, left;
};
constexpr tile_corner corner_of(unsigned index, long long m, long long n, int block_m, int block_n, int band) {
    const tile_place at = tile_of(index, tiles_along(m, block_m), tiles_along(n, block_n), band);
    return {static_cast<long long>(at.row) * block_m, static_cast<long long>(at.column) * block_n};
}

// Shared memory answers eight lanes at a time where each takes 16 bytes (a "chunk"); the eight must lie in different
// eighths of the 128 bytes that the 32 banks span.

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
