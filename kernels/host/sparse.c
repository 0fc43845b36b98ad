/* Makes lines of sparse matrices dense, and computes moments of their entries. */

#include <stdint.h>
#include <string.h>

#include "host.h"

/* Adds the entries of a line, from number `at` to before `end`, to its dense elements from place `left` on. The
 * comparisons without a sign also find negative indices. */
#define ADD(NAME, INDEX, VALUE)                                                                                       \
  static int NAME(const struct ooc_entries *x, int64_t at, int64_t end, void *line) {                                 \
    const INDEX *indices = x->indices;                                                                                \
    const VALUE *values = x->values;                                                                                  \
    VALUE *to = line;                                                                                                 \
    uint64_t left = (uint64_t)x->left, count = (uint64_t)(x->right - x->left), width = (uint64_t)x->width;            \
    for (; at < end; ++at) {                                                                                          \
      uint64_t place = (uint64_t)(int64_t)indices[at];                                                                \
      if (place >= width)                                                                                             \
        return 1;                                                                                                     \
      if (place - left < count)                                                                                       \
        to[place - left] += values[at];                                                                               \
    }                                                                                                                 \
    return 0;                                                                                                         \
  }
#define ADD_BOTH(NAME, VALUE) \
  ADD(NAME##_32, int32_t, VALUE) \
  ADD(NAME##_64, int64_t, VALUE)
ADD_BOTH(add_i8, uint8_t)
ADD_BOTH(add_i16, uint16_t)
ADD_BOTH(add_i32, uint32_t)
ADD_BOTH(add_i64, uint64_t)
ADD_BOTH(add_f32, float)
ADD_BOTH(add_f64, double)
ADD_BOTH(add_c64, _Complex float)
ADD_BOTH(add_c128, _Complex double)

typedef int (*adder)(const struct ooc_entries *, int64_t, int64_t, void *);
/* In the order of `_KINDS` of sparse.py: for indices of 4 bytes and of 8. */
static const adder adders[][2] = {
    {add_i8_32, add_i8_64},   {add_i16_32, add_i16_64}, {add_i32_32, add_i32_64}, {add_i64_32, add_i64_64},
    {add_f32_32, add_f32_64}, {add_f64_32, add_f64_64}, {add_c64_32, add_c64_64}, {add_c128_32, add_c128_64},
};
static const size_t sizes[] = {1, 2, 4, 8, 4, 8, 8, 16};

int ooc_make_dense(const struct ooc_entries *x, char *to, ptrdiff_t pitch) {
  adder add = adders[x->kind][x->index_bytes == 8];
  size_t size = sizes[x->kind] * (size_t)(x->right - x->left);
  for (int64_t i = 0; i < x->lines; ++i, to += pitch) {
    int64_t at = x->starts[i] < x->first ? x->first : x->starts[i];
    int64_t end = x->starts[i + 1] > x->last ? x->last : x->starts[i + 1];
    if (x->starts[i] >= x->first) /* else the line was begun by an earlier call */
      memset(to, 0, size);
    if (add(x, at - x->first, end - x->first, to))
      return 1;
  }
  return 0;
}

/* Defines `ooc_moments` for one type of groups. */
#define MOMENTS(NAME, INDEX)                                                                                          \
  static int NAME(int64_t count, int64_t extent, const INDEX *groups, const double *x, int64_t *counts,              \
                  double *totals, double *squares, double *low, double *high) {                                       \
    for (int64_t i = 0; i < count; ++i) {                                                                             \
      uint64_t group = (uint64_t)(int64_t)groups[i];                                                                  \
      if (group >= (uint64_t)extent)                                                                                  \
        return 1;                                                                                                     \
      counts[group] += 1;                                                                                             \
      totals[group] += x[i];                                                                                          \
      /* A NaN stays. */                                                                                              \
      low[group] = low[group] <= x[i] || low[group] != low[group] ? low[group] : x[i];                                \
      high[group] = high[group] >= x[i] || high[group] != high[group] ? high[group] : x[i];                           \
    }                                                                                                                 \
    for (int64_t i = 0; i < count; ++i) {                                                                             \
      double apart = x[i] - totals[groups[i]] / (double)counts[groups[i]];                                            \
      squares[groups[i]] += apart * apart;                                                                            \
    }                                                                                                                 \
    return 0;                                                                                                         \
  }
MOMENTS(moments_32, int32_t)
MOMENTS(moments_64, int64_t)

int ooc_moments(int index_bytes, int64_t count, int64_t extent, const void *groups, const double *x, int64_t *counts,
                double *totals, double *squares, double *low, double *high) {
  return index_bytes == 4 ? moments_32(count, extent, groups, x, counts, totals, squares, low, high)
                          : moments_64(count, extent, groups, x, counts, totals, squares, low, high);
}
