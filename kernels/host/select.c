/* Selects the largest elements of rows of a matrix, by several threads. */

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

/* Elements that are compared with one branch. */
#define BLOCK 64
/* Elements that are sorted by insertion. */
#define RUN 8
/* Rows whose elements are far apart are searched together, as long as their keys have at most this many bytes. */
#define TOGETHER ((size_t)1 << 20)
#define MAX_THREADS 64
/* Elements per thread for which it pays to start it. */
#define MIN_ELEMENTS ((size_t)1 << 18)

#define ALWAYS static inline __attribute__((always_inline))
/* Compiles a function once more, for processors with AVX2. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* Returns how many rows are searched together, if the keys that are selected of a row have `size` bytes. */
static size_t rows_together(size_t size) {
  size_t rows = TOGETHER / size / 2;
  return rows < 1 ? 1 : rows < BLOCK ? rows : BLOCK;
}

#define NAME(x) float32_##x
#define SUM float
#define SCORE float
#define INDEX uint32_t
#define KEY uint64_t
#include "select.h"

#define NAME(x) float64_##x
#define SUM double
#define SCORE double
#define INDEX uint64_t
#define KEY unsigned __int128
#include "select.h"

#define NAME(x) int32_##x
#define SUM int32_t
#define SCORE double
#define INDEX uint64_t
#define KEY unsigned __int128
#include "select.h"

/* The rows that one of the threads searches. */
struct share {
  const struct ooc_selection *selection;
  void (*search)(const struct ooc_selection *s, size_t from, size_t to, void *space);
  size_t from, to;
  void *space;
};

static void *run(void *given) {
  const struct share *x = given;
  x->search(x->selection, x->from, x->to, x->space);
  return NULL;
}

int ooc_select(const struct ooc_selection *s, size_t threads) {
  static void (*const searches[][2])(const struct ooc_selection *, size_t, size_t, void *) = {
      {float32_along, float32_across}, {float64_along, float64_across}, {int32_along, int32_across}};
  struct share shares[MAX_THREADS];
  pthread_t ids[MAX_THREADS];
  bool started[MAX_THREADS] = {false};
  size_t fit = s->rows * s->cols / MIN_ELEMENTS, size = s->count * (s->dtype ? 16 : 8);
  threads = threads < fit ? threads : fit;
  threads = threads < 1 ? 1 : threads < MAX_THREADS ? threads : MAX_THREADS;
  size_t room = (1 + 2 * (s->along == 1 ? 1 : rows_together(size))) * size, each = (s->rows + threads - 1) / threads;
  char *space = malloc(threads * room);
  if (!space)
    return ENOMEM;
  for (size_t i = 0; i < threads; ++i) {
    size_t from = each * i < s->rows ? each * i : s->rows, to = s->rows - from < each ? s->rows : from + each;
    shares[i] = (struct share){s, searches[s->dtype][s->along != 1], from, to, space + i * room};
    started[i] = i && from < to && !pthread_create(ids + i, NULL, run, shares + i);
  }
  for (size_t i = 0; i < threads; ++i)
    if (!started[i])
      run(shares + i);
  for (size_t i = 0; i < threads; ++i)
    if (started[i])
      pthread_join(ids[i], NULL);
  free(space);
  return 0;
}
