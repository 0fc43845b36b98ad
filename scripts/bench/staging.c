/* A plain loop that copies an array between pageable memory and the device: what the ring is measured against.
 *
 * Each thread has a stream, a few pinned buffers and an event for each of them. To upload, it takes the next piece of
 * the array, waits until the latest copy from its next buffer has ended, fills the buffer and issues the copy to the
 * device. To download, it waits for the latest copy to its next buffer, moves that piece to the array, takes the next
 * piece and issues its copy to the buffer. All threads of all directions start at the same time.
 *
 * `staging_loop.py` compiles this file and calls it. */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { NOT_READY = 600 }; /* CUDA_ERROR_NOT_READY */

/* Functions of the CUDA driver: cuCtxSetCurrent, cuMemcpyAsync, cuEventRecord and cuEventQuery. */
struct driver {
  int (*enter)(void *context);
  int (*copy)(uint64_t to, uint64_t from, size_t size, void *stream);
  int (*record)(void *event, void *stream);
  int (*query)(void *event);
};

/* The copy of an array in one direction. Thread t has stream t, and from number t * buffers on, as many events and
 * buffers of `piece` bytes each. */
struct direction {
  size_t threads, buffers, piece, size;
  char *array, *memory;
  uint64_t device;
  void **streams, **events;
  int uploads;
  int streamed; /* whether the stores of the copies on the host bypass the caches */
  /* Results. */
  int error;
  double seconds;
  atomic_size_t next;
};

struct thread {
  pthread_t id;
  const struct driver *driver;
  void *context;
  struct direction *direction;
  size_t number;
  atomic_int *waiting, *go;
  double end;
  int error;
};

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Copies a multiple of 128 bytes between addresses that are multiples of 32. */
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_streamed(char *to, const char *from, size_t size) {
  for (size_t i = 0; i < size; i += 128) {
    __m256i a = _mm256_loadu_si256((const void *)(from + i)), b = _mm256_loadu_si256((const void *)(from + i + 32));
    __m256i c = _mm256_loadu_si256((const void *)(from + i + 64)), d = _mm256_loadu_si256((const void *)(from + i + 96));
    _mm256_stream_si256((void *)(to + i), a);
    _mm256_stream_si256((void *)(to + i + 32), b);
    _mm256_stream_si256((void *)(to + i + 64), c);
    _mm256_stream_si256((void *)(to + i + 96), d);
  }
  _mm_sfence();
}
#else
static void copy_streamed(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

static void move(const struct direction *of, char *to, const char *from, size_t size) {
  if (of->streamed && ((uintptr_t)to | (uintptr_t)from) % 32 == 0 && size % 128 == 0)
    copy_streamed(to, from, size);
  else
    memcpy(to, from, size);
}

static int await(const struct thread *thread, void *event) {
  int status;
  while ((status = thread->driver->query(event)) == NOT_READY)
    RELAX();
  return status;
}

/* Takes the next piece. Returns its bytes, 0 if there is none. */
static size_t take(struct direction *of, size_t *at) {
  *at = atomic_fetch_add(&of->next, 1) * of->piece;
  return *at >= of->size ? 0 : *at + of->piece > of->size ? of->size - *at : of->piece;
}

static int issue(const struct thread *thread, size_t at, char *buffer, size_t size, void *event) {
  const struct direction *of = thread->direction;
  uint64_t here = (uintptr_t)buffer, there = of->device + at;
  void *stream = of->streams[thread->number];
  int error = thread->driver->copy(of->uploads ? there : here, of->uploads ? here : there, size, stream);
  return error ? error : thread->driver->record(event, stream);
}

static int upload(struct thread *thread, void **events, char *memory) {
  struct direction *of = thread->direction;
  int error = 0;
  size_t at, size, count = 0;
  for (; !error && (size = take(of, &at)); ++count) {
    size_t turn = count % of->buffers;
    char *buffer = memory + turn * of->piece;
    if (count >= of->buffers)
      error = await(thread, events[turn]);
    if (!error) {
      move(of, buffer, of->array + at, size);
      error = issue(thread, at, buffer, size, events[turn]);
    }
  }
  return !error && count ? await(thread, events[(count - 1) % of->buffers]) : error;
}

static int download(struct thread *thread, void **events, char *memory) {
  struct direction *of = thread->direction;
  size_t at[64], size[64] = {0};
  int error = 0;
  for (size_t count = 0, idle = 0; !error && idle < of->buffers; ++count) {
    size_t turn = count % of->buffers;
    char *buffer = memory + turn * of->piece;
    if (size[turn]) {
      error = await(thread, events[turn]);
      if (!error)
        move(of, of->array + at[turn], buffer, size[turn]);
    }
    size[turn] = take(of, at + turn);
    idle = size[turn] ? 0 : idle + 1;
    if (!error && size[turn])
      error = issue(thread, at[turn], buffer, size[turn], events[turn]);
  }
  return error;
}

static void *serve(void *given) {
  struct thread *thread = given;
  struct direction *of = thread->direction;
  size_t first = thread->number * of->buffers;
  thread->error = thread->driver->enter(thread->context);
  atomic_fetch_sub(thread->waiting, 1);
  while (!atomic_load(thread->go))
    RELAX();
  if (!thread->error)
    thread->error = (of->uploads ? upload : download)(thread, of->events + first, of->memory + first * of->piece);
  thread->end = now();
  return NULL;
}

/* Copies in all directions at the same time. Sets the seconds and the error of each. Returns 0, or -1 if a thread
 * cannot be started. */
int staging_run(const struct driver *driver, void *context, struct direction *directions, size_t count) {
  size_t threads = 0, started = 0;
  for (size_t i = 0; i < count; ++i)
    threads += directions[i].threads;
  struct thread *all = calloc(threads, sizeof *all);
  if (!all)
    return -1;
  atomic_int waiting = (int)threads, go = 0;
  for (size_t i = 0; i < count; ++i) {
    atomic_store(&directions[i].next, 0);
    directions[i].error = 0;
    directions[i].seconds = 0;
    for (size_t j = 0; j < directions[i].threads; ++j) {
      struct thread *thread = all + started;
      *thread = (struct thread){.driver = driver, .context = context, .direction = directions + i, .number = j,
                                .waiting = &waiting, .go = &go};
      if (pthread_create(&thread->id, NULL, serve, thread))
        goto end;
      ++started;
    }
  }
  while (atomic_load(&waiting))
    RELAX();
end:;
  double begin = now();
  atomic_store(&go, 1);
  for (size_t i = 0; i < started; ++i) {
    struct direction *of = all[i].direction;
    pthread_join(all[i].id, NULL);
    if (all[i].end - begin > of->seconds)
      of->seconds = all[i].end - begin;
    if (all[i].error)
      of->error = all[i].error;
  }
  free(all);
  return started == threads ? 0 : -1;
}
