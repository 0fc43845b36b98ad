/* Computes squared distances of pairs of rows in double precision, and sorts the candidates of rows by them. */

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "threads.h"

/* Partial sums, which the compiler computes together. Element i is added to number i % LANES. */
#define LANES 8
/* Elements and candidates per thread for which it pays to start it. */
#define MIN_ELEMENTS ((size_t)1 << 17)
#define MIN_CANDIDATES ((size_t)1 << 13)
/* The row of y of a pair is prefetched while the pair PREFETCHED places before it is computed: by cache lines of LINE
 * bytes, and at most MAX_FETCHED bytes of a row. */
#define PREFETCHED 4
#define LINE 64
#define MAX_FETCHED 2048

struct sums {
  const struct ooc_pairs *pairs;
  double *sums;
};

/* Adds the squared distances of pairs number `from` to before `to`, of rows of one dtype. */
#define ADD(NAME, TYPE)                                                                                               \
  WIDE static void NAME(const struct ooc_pairs *g, double *sums, size_t from, size_t to) {                            \
    size_t width = g->width, fetched = width * sizeof(TYPE) < MAX_FETCHED ? width * sizeof(TYPE) : MAX_FETCHED;       \
    for (size_t i = from; i < to; ++i) {                                                                              \
      int64_t row = g->x_at[i / g->each], col = g->y_at[i];                                                           \
      const TYPE *x = (const TYPE *)(g->x + row * g->x_pitch), *y = (const TYPE *)(g->y + col * g->y_pitch);          \
      double p = g->x_scales ? g->x_scales[row] : 1, q = g->y_scales ? g->y_scales[col] : 1, lanes[LANES] = {0};      \
      if (i + PREFETCHED < to)                                                                                        \
        for (size_t at = 0; at < fetched; at += LINE)                                                                 \
          __builtin_prefetch(g->y + g->y_at[i + PREFETCHED] * g->y_pitch + at);                                       \
      size_t j = 0;                                                                                                   \
      for (; j + LANES <= width; j += LANES)                                                                          \
        for (size_t lane = 0; lane < LANES; ++lane) {                                                                 \
          double apart = x[j + lane] * p - y[j + lane] * q;                                                           \
          lanes[lane] += apart * apart;                                                                               \
        }                                                                                                             \
      for (size_t lane = 0; j < width; ++j, ++lane) {                                                                 \
        double apart = x[j] * p - y[j] * q;                                                                           \
        lanes[lane] += apart * apart;                                                                                 \
      }                                                                                                               \
      for (size_t half = LANES / 2; half; half /= 2)                                                                  \
        for (size_t lane = 0; lane < half; ++lane)                                                                    \
          lanes[lane] += lanes[lane + half];                                                                          \
      sums[i] += lanes[0];                                                                                            \
    }                                                                                                                 \
  }
ADD(add_f32, float)
ADD(add_f64, double)
ADD(add_i8, int8_t)

static void add(void *given, size_t from, size_t to, size_t thread) {
  static void (*const adders[])(const struct ooc_pairs *, double *, size_t, size_t) = {add_f32, add_f64, add_i8};
  const struct sums *x = given;
  (void)thread;
  adders[x->pairs->dtype](x->pairs, x->sums, from, to);
}

void ooc_add_distances(const struct ooc_pairs *pairs, double *sums, size_t threads) {
  size_t fit = pairs->count * pairs->width / MIN_ELEMENTS;
  struct sums given = {pairs, sums};
  ooc_share(pairs->count, ooc_threads(threads < fit ? threads : fit), add, &given);
}

struct candidate {
  double distance;
  int64_t index;
};

struct rows {
  double *distances;
  int64_t *indices;
  size_t count;
  struct candidate *space;
};

static int compared(const void *one, const void *other) {
  const struct candidate *x = one, *y = other;
  if (x->distance != y->distance && !(isnan(x->distance) && isnan(y->distance)))
    return isnan(x->distance) || x->distance > y->distance ? 1 : -1;
  return (x->index > y->index) - (x->index < y->index);
}

static void sort(void *given, size_t from, size_t to, size_t thread) {
  const struct rows *x = given;
  struct candidate *candidates = x->space + thread * x->count;
  for (size_t i = from * x->count; i < to * x->count; i += x->count) {
    for (size_t j = 0; j < x->count; ++j)
      candidates[j] = (struct candidate){x->distances[i + j], x->indices[i + j]};
    qsort(candidates, x->count, sizeof *candidates, compared);
    for (size_t j = 0; j < x->count; ++j) {
      x->distances[i + j] = candidates[j].distance;
      x->indices[i + j] = candidates[j].index;
    }
  }
}

int ooc_sort_candidates(double *distances, int64_t *indices, size_t rows, size_t count, size_t threads) {
  size_t fit = rows * count / MIN_CANDIDATES;
  threads = ooc_threads(threads < fit ? threads : fit);
  struct rows given = {distances, indices, count, malloc((threads * count + 1) * sizeof(struct candidate))};
  if (!given.space)
    return ENOMEM;
  ooc_share(rows, threads, sort, &given);
  free(given.space);
  return 0;
}
