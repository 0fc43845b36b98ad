/* Mirrors the lower triangle of a square, by several threads. */

#include <string.h>

#include "host.h"
#include "threads.h"

/* Side of the blocks that are transposed at a time: they fit into a core's first cache. */
#define SIDE 32
/* Blocks per thread for which it pays to start it. */
#define MIN_BLOCKS 256

struct mirror {
  char *square;
  ptrdiff_t pitch;
  size_t extent;
};

/* Defines a function that mirrors blocks, by their numbers. Through `turned`, rows that are a power of two
 * apart are read and written one after the other. */
#define DEFINE(name, word)                                                                                             \
  static void name(void *given, size_t from, size_t to, size_t thread) {                                               \
    const struct mirror *x = given;                                                                                    \
    size_t i = 0;                                                                                                      \
    (void)thread;                                                                                                      \
    while ((i + 1) * (i + 2) / 2 <= from)                                                                              \
      ++i;                                                                                                             \
    for (size_t at = from, j = from - i * (i + 1) / 2; at < to; ++at) {                                                \
      size_t top = SIDE * i, left = SIDE * j;                                                                          \
      size_t rows = x->extent - top < SIDE ? x->extent - top : SIDE;                                                   \
      size_t cols = x->extent - left < SIDE ? x->extent - left : SIDE;                                                 \
      word turned[SIDE][SIDE];                                                                                         \
      for (size_t r = 0; r < rows; ++r) {                                                                              \
        const word *row = (const word *)(x->square + (ptrdiff_t)(top + r) * x->pitch) + left;                          \
        for (size_t c = 0; c < cols; ++c)                                                                              \
          turned[c][r] = row[c];                                                                                       \
      }                                                                                                                \
      for (size_t c = 0; c < cols; ++c) {                                                                              \
        size_t first = i == j ? c + 1 : 0;                                                                             \
        word *row = (word *)(x->square + (ptrdiff_t)(left + c) * x->pitch) + top;                                      \
        if (first < rows)                                                                                              \
          memcpy(row + first, turned[c] + first, (rows - first) * sizeof(word));                                       \
      }                                                                                                                \
      if (++j > i) {                                                                                                   \
        ++i;                                                                                                           \
        j = 0;                                                                                                         \
      }                                                                                                                \
    }                                                                                                                  \
  }

DEFINE(mirror_32, uint32_t)
DEFINE(mirror_64, uint64_t)

void ooc_mirror(char *square, ptrdiff_t pitch, size_t extent, size_t size, size_t threads) {
  struct mirror mirror = {square, pitch, extent};
  size_t blocks = (extent + SIDE - 1) / SIDE, count = blocks * (blocks + 1) / 2, fit = count / MIN_BLOCKS;
  threads = ooc_threads(threads < fit ? threads : fit);
  ooc_share(count, threads, size == 4 ? mirror_32 : mirror_64, &mirror);
}
