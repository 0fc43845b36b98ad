/* Threads of a function, which share its work and end with it. */

#include <pthread.h>
#include <stdbool.h>

#include "threads.h"

#define MAX_THREADS 64

struct share {
  void (*work)(void *given, size_t from, size_t to, size_t thread);
  void *given;
  size_t from, to, thread;
};

static void *run(void *given) {
  const struct share *x = given;
  x->work(x->given, x->from, x->to, x->thread);
  return NULL;
}

size_t ooc_threads(size_t wanted) { return wanted < 1 ? 1 : wanted < MAX_THREADS ? wanted : MAX_THREADS; }

void ooc_share(size_t count, size_t threads, void (*work)(void *given, size_t from, size_t to, size_t thread),
               void *given) {
  struct share shares[MAX_THREADS];
  pthread_t ids[MAX_THREADS];
  bool started[MAX_THREADS] = {false};
  size_t each = (count + threads - 1) / threads;
  for (size_t i = 0; i < threads; ++i) {
    size_t from = each * i < count ? each * i : count, to = count - from < each ? count : from + each;
    shares[i] = (struct share){work, given, from, to, i};
    started[i] = i && from < to && !pthread_create(ids + i, NULL, run, shares + i);
  }
  for (size_t i = 0; i < threads; ++i)
    if (!started[i])
      run(shares + i);
  for (size_t i = 0; i < threads; ++i)
    if (started[i])
      pthread_join(ids[i], NULL);
}
