/* Applies the steps of an epilogue to a strip of C, by several threads. */

#include <math.h>
#include <stddef.h>

#include "host.h"
#include "threads.h"

/* Elements that all steps change before the next ones are loaded. They fit in the first cache of a core. */
#define PIECE 1024
/* Elements per thread for which it pays to start it. */
#define MIN_ELEMENTS ((size_t)1 << 18)

/* What each step makes of c, the element in a column with the number v. `factor` is the row's number u, for steps with
 * products multiplied by `value`. */
#define EACH(expression)           \
  for (size_t j = 0; j < n; j++) { \
    const double v = cols ? cols[j] : 1; \
    double c = x[j];               \
    x[j] = (expression);           \
  }                                \
  break

/* Changes n elements x of a row. */
WIDE static void change(const struct ooc_step *step, size_t row, size_t left, double *restrict x, size_t n) {
  const double *restrict cols = step->cols ? step->cols + left : NULL;
  const double value = step->value, u = step->rows ? step->rows[row] : 1, factor = value * u;
  const double other = value != 0 ? NAN : 0;
  switch (step->kind) {
    case OOC_SCALE: EACH(c * (factor * v));
    case OOC_RANK_ONE: EACH(c + factor * v);
    case OOC_CORRELATION: EACH((c *= factor * v, c > 1 ? 1 : c < -1 ? -1 : c));
    case OOC_SQUARED: EACH((c *= c, c - value * (1 - c)));
    case OOC_WITHIN: EACH(u <= v ? c : other);
  }
}

WIDE static void load_float(const float *restrict from, double *restrict x, size_t n, double alpha) {
  for (size_t j = 0; j < n; j++) x[j] = from[j] * alpha;
}
WIDE static void load_double(const double *restrict from, double *restrict x, size_t n, double alpha) {
  for (size_t j = 0; j < n; j++) x[j] = from[j] * alpha;
}
WIDE static void store_float(const double *restrict x, float *restrict to, size_t n) {
  for (size_t j = 0; j < n; j++) to[j] = (float)x[j];
}
WIDE static void store_double(const double *restrict x, double *restrict to, size_t n) {
  for (size_t j = 0; j < n; j++) to[j] = x[j];
}

static void run(void *given, size_t from, size_t to, size_t thread) {
  const struct ooc_chain *chain = given;
  double x[PIECE];
  (void)thread;
  for (size_t i = from; i < to; i++) {
    for (size_t left = 0; left < chain->width; left += PIECE) {
      const size_t rest = chain->width - left, n = rest < PIECE ? rest : PIECE, at = i * chain->width + left;
      if (chain->sums_double)
        load_double((const double *)chain->sums + at, x, n, chain->alpha);
      else
        load_float((const float *)chain->sums + at, x, n, chain->alpha);
      for (size_t s = 0; s < chain->count; s++) change(&chain->steps[s], i, left, x, n);
      if (chain->result_double)
        store_double(x, (double *)chain->result + at, n);
      else
        store_float(x, (float *)chain->result + at, n);
    }
  }
}

void ooc_run_chain(const struct ooc_chain *chain, size_t threads) {
  const size_t fit = chain->height * chain->width / MIN_ELEMENTS;
  ooc_share(chain->height, ooc_threads(threads < fit ? threads : fit), run, (void *)chain);
}
