/* Selects the largest elements of rows of a matrix, by several threads. */

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "threads.h"

/* Elements that are compared with one branch. */
#define BLOCK 64
/* Elements that are sorted by insertion. */
#define RUN 8
/* Rows whose elements are far apart are searched together, as long as their keys have at most this many bytes. */
#define TOGETHER ((size_t)1 << 20)
/* Elements per thread for which it pays to start it. */
#define MIN_ELEMENTS ((size_t)1 << 18)

/* How scores are computed from elements and the factors of their rows and columns (`ooc_selection`). */
enum rule { PLAIN, COSINES, NEARNESS };

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

/* What the threads search, each with its own `room` bytes of `space`. */
struct search {
  const struct ooc_selection *selection;
  void (*search)(const struct ooc_selection *s, size_t from, size_t to, void *space);
  char *space;
  size_t room;
};

static void run(void *given, size_t from, size_t to, size_t thread) {
  const struct search *x = given;
  x->search(x->selection, from, to, x->space + thread * x->room);
}

int ooc_select(const struct ooc_selection *s, size_t threads) {
  static void (*const searches[][2])(const struct ooc_selection *, size_t, size_t, void *) = {
      {float32_along, float32_across}, {float64_along, float64_across}, {int32_along, int32_across}};
  size_t fit = s->rows * s->cols / MIN_ELEMENTS, size = s->count * (s->dtype ? 16 : 8);
  threads = ooc_threads(threads < fit ? threads : fit);
  size_t room = (1 + 2 * (s->along == 1 ? 1 : rows_together(size))) * size;
  struct search search = {s, searches[s->dtype][s->along != 1], malloc(threads * room), room};
  if (!search.space)
    return ENOMEM;
  ooc_share(s->rows, threads, run, &search);
  free(search.space);
  return 0;
}
