/* Threads that copy blocks between the host and the device, piece by piece through pinned buffers.
 *
 * To upload, a thread moves a piece into one of its buffers, and issues the copy to the device. While the device
 * copies, the thread fills its next buffer. To download, a thread issues copies to several buffers, and moves the
 * pieces to their places as the copies end.
 *
 * Buffers of a lane go through its memory, so that a buffer is no more in the caches of the core when the link copies
 * to its memory again. Such copies would be three times as slow.
 *
 * After each copy, the device writes a number to the mark of the buffer, in host memory. A thread that waits for the
 * copy reads the mark. To ask the driver would make all threads wait that call it, since it has one lock.
 *
 * One mutex protects the queue and the counts of blocks. No thread calls the driver, or moves a piece, while it
 * holds the mutex. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "host.h"

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

/* Nanoseconds for which a thread that waits keeps its core busy before it sleeps. To wake it takes as long. */
#define SPIN 50000
/* Nanoseconds between questions to the driver whether the device has failed. */
#define CHECK 2000000
/* A thread with at least this many pieces to finish leaves a block's last ones to others: this many for each. */
#define FEW 2
/* CUDA_ERROR_NOT_READY, and CU_MEMORYTYPE_UNIFIED: the driver itself finds out whether an address is on the host. */
enum { NOT_READY = 600, UNIFIED = 4 };

struct buffer {
  char *memory; /* of the latest piece */
  size_t size;
  _Atomic uint32_t *mark; /* the device writes the number of the latest copy to it, when that has ended */
  uint32_t copies;
  void *stream;            /* of the latest copy */
  struct ooc_block *block; /* the one of which a piece is being downloaded to this buffer, or NULL */
  size_t piece;
};

struct lane {
  struct ooc_pool *pool;
  pthread_t thread;
  pthread_mutex_t used; /* held by the thread that uses the buffers */
  struct buffer *buffers;
  size_t next;    /* number of the buffer to use */
  size_t pending; /* pieces that are left to finish */
  char *memory;
  size_t size, at; /* bytes of the memory, and where in it the next buffer is */
};

struct ooc_pool {
  struct ooc_driver driver;
  void *context;
  bool uploads, closing;
  size_t buffers, lanes; /* lanes whose threads have been started */
  struct lane *lane;
  struct buffer *buffer;
  pid_t owner;
  pthread_mutex_t mutex;
  pthread_cond_t work, done;
  struct ooc_block *first, *last; /* with pieces that no thread has taken */
  atomic_int ready;               /* whether threads need not wait for work */
};

static int64_t now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

/* Counts a piece as finished. The block may be gone afterwards. */
static void count_finished(struct ooc_pool *pool, struct ooc_block *block) {
  pthread_mutex_lock(&pool->mutex);
  if (--block->unfinished == 0)
    pthread_cond_broadcast(&pool->done);
  pthread_mutex_unlock(&pool->mutex);
}

static void fail(struct ooc_pool *pool, struct ooc_block *block, int error) {
  pthread_mutex_lock(&pool->mutex);
  if (!block->error)
    block->error = error;
  pthread_mutex_unlock(&pool->mutex);
}

static bool has_failed(struct ooc_pool *pool, struct ooc_block *block) {
  pthread_mutex_lock(&pool->mutex);
  bool failed = block->error != 0;
  pthread_mutex_unlock(&pool->mutex);
  return failed;
}

/* Counts a piece as issued. After the last one, it records the end of the copies. */
static void count_issued(struct ooc_pool *pool, struct ooc_block *block) {
  pthread_mutex_lock(&pool->mutex);
  bool last = --block->unissued == 0;
  pthread_mutex_unlock(&pool->mutex);
  if (!last)
    return;
  int error = pool->driver.record(block->end, block->stream);
  if (error)
    fail(pool, block, error);
  pthread_mutex_lock(&pool->mutex);
  block->issued = 1;
  --block->unfinished; /* it counts the event as one more piece */
  pthread_cond_broadcast(&pool->done);
  pthread_mutex_unlock(&pool->mutex);
}

static void sleep_for(int64_t nanoseconds) {
  struct timespec time = {.tv_sec = 0, .tv_nsec = nanoseconds};
  nanosleep(&time, NULL);
}

/* Waits until the latest copy from or to a buffer has ended. */
static int await(struct ooc_pool *pool, struct buffer *buffer) {
  int64_t start = now(), checked = start - CHECK;
  while (atomic_load_explicit(buffer->mark, memory_order_acquire) != buffer->copies) {
    int64_t waited = now() - start;
    if (waited < SPIN) {
      RELAX();
      continue;
    }
    if (now() - checked > CHECK) {
      int status = pool->driver.query(buffer->stream);
      if (status && status != NOT_READY)
        return status;
      checked = now();
    }
    sleep_for(waited < 40 * SPIN ? SPIN / 2 : 2 * SPIN);
  }
  return 0;
}

/* Issues the copy of a piece between a buffer and the device. */
static int copy(struct ooc_pool *pool, struct ooc_block *block, size_t number, struct buffer *buffer) {
  const struct ooc_piece *piece = block->pieces + number;
  uint64_t there = block->device + piece->row * block->row_bytes + piece->at, here = (uintptr_t)buffer->memory;
  int error;
  if (piece->size == block->row_bytes || piece->rows == 1) {
    size_t size = piece->size * piece->rows;
    error = pool->uploads ? pool->driver.copy(there, here, size, block->stream)
                          : pool->driver.copy(here, there, size, block->stream);
  } else {
    struct ooc_end device = {.kind = UNIFIED, .address = there, .pitch = block->row_bytes};
    struct ooc_end host = {.kind = UNIFIED, .address = here, .pitch = piece->size};
    struct ooc_rectangle copied = {
        pool->uploads ? host : device, pool->uploads ? device : host, piece->size, piece->rows};
    error = pool->driver.copy_rows(&copied, block->stream);
  }
  if (error)
    return error;
  buffer->stream = block->stream;
  error = pool->driver.write(block->stream, (uintptr_t)buffer->mark, buffer->copies + 1, 0);
  if (!error)
    ++buffer->copies;
  else /* the buffer can be used again when the copy has ended */
    while (pool->driver.query(block->stream) == NOT_READY)
      sleep_for(SPIN);
  return error;
}

/* Moves the piece that was downloaded to a buffer to its place, if there is one. */
static void finish(struct lane *lane, struct buffer *buffer) {
  struct ooc_pool *pool = lane->pool;
  struct ooc_block *block = buffer->block;
  if (!block)
    return;
  buffer->block = NULL;
  --lane->pending;
  int error = await(pool, buffer);
  if (!error && !has_failed(pool, block))
    error = -block->move(block->place, buffer->piece, block->pieces + buffer->piece, buffer->memory);
  if (error)
    fail(pool, block, error);
  count_finished(pool, block);
}

/* Finishes the piece whose copy was issued first, of those that are left to finish. */
static void finish_oldest(struct lane *lane) {
  size_t before = lane->pending;
  for (size_t i = lane->next; lane->pending == before; i = (i + 1) % lane->pool->buffers)
    finish(lane, lane->buffers + i);
}

/* Finds room for a piece in the memory of a lane, behind the latest one. Waits for the pieces that are there. */
static int place(struct lane *lane, struct buffer *buffer, size_t size) {
  if (lane->at + size > lane->size)
    lane->at = 0;
  buffer->memory = lane->memory + lane->at;
  buffer->size = size;
  lane->at += (size + 63) & ~(size_t)63;
  for (size_t i = 0; i < lane->pool->buffers; ++i) {
    struct buffer *other = lane->buffers + i;
    if (other == buffer || other->memory >= buffer->memory + size || buffer->memory >= other->memory + other->size)
      continue;
    finish(lane, other);
    int error = await(lane->pool, other);
    if (error)
      return error;
  }
  return 0;
}

/* Copies a piece by the means of a lane; to download, up to where its copy is issued. */
static void handle(struct lane *lane, struct ooc_block *block, size_t number) {
  struct ooc_pool *pool = lane->pool;
  struct buffer *buffer = lane->buffers + lane->next;
  lane->next = (lane->next + 1) % pool->buffers;
  finish(lane, buffer);
  int error = 0;
  if (!has_failed(pool, block)) {
    error = await(pool, buffer);
    if (!error)
      error = place(lane, buffer, block->pieces[number].rows * block->pieces[number].size);
    if (!error && pool->uploads)
      error = -block->move(block->place, number, block->pieces + number, buffer->memory);
    if (number == 0)
      block->issued_at = now();
    if (!error)
      error = copy(pool, block, number, buffer);
    if (!error && !pool->uploads) {
      buffer->block = block;
      buffer->piece = number;
      ++lane->pending;
    }
  }
  if (error)
    fail(pool, block, error);
  bool pending = buffer->block != NULL;
  count_issued(pool, block);
  if (!pending)
    count_finished(pool, block);
}

/* Takes a piece that no thread has taken; returns its block, or NULL. The last pieces of a block are left to threads
 * that have fewer pieces to finish. */
static struct ooc_block *take(struct lane *lane, size_t *number) {
  struct ooc_pool *pool = lane->pool;
  pthread_mutex_lock(&pool->mutex);
  struct ooc_block *block = pool->first;
  if (block && lane->pending >= FEW && block->count - block->taken < FEW * pool->lanes)
    block = NULL;
  if (block) {
    *number = block->taken++;
    if (block->taken == block->count) {
      pool->first = block->next;
      if (!pool->first)
        atomic_store_explicit(&pool->ready, pool->closing, memory_order_relaxed);
    }
  }
  pthread_mutex_unlock(&pool->mutex);
  return block;
}

/* Waits until there are pieces to take; returns false if the pool closes. */
static bool wait_for_work(struct ooc_pool *pool) {
  for (int64_t start = now(); now() - start < SPIN && !atomic_load_explicit(&pool->ready, memory_order_relaxed);)
    RELAX();
  pthread_mutex_lock(&pool->mutex);
  while (!pool->first && !pool->closing)
    pthread_cond_wait(&pool->work, &pool->mutex);
  bool found = pool->first != NULL;
  pthread_mutex_unlock(&pool->mutex);
  return found;
}

static void *serve(void *given) {
  struct lane *lane = given;
  struct ooc_pool *pool = lane->pool;
  int entered = pool->driver.enter(pool->context);
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* nanoseconds by which a sleep may last longer */
#endif
  while (wait_for_work(pool)) {
    struct ooc_block *block;
    size_t number;
    pthread_mutex_lock(&lane->used);
    while ((block = take(lane, &number)) || lane->pending) {
      if (!block) {
        finish_oldest(lane);
        continue;
      }
      if (entered)
        fail(pool, block, entered);
      handle(lane, block, number);
    }
    pthread_mutex_unlock(&lane->used);
  }
  return NULL;
}

struct ooc_pool *ooc_open(const struct ooc_driver *driver, void *context, int uploads, size_t lanes, size_t buffers,
                          char *memory, size_t pitch, size_t size, char *marks) {
  struct ooc_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return NULL;
  *pool = (struct ooc_pool){.driver = *driver, .context = context, .uploads = uploads != 0, .buffers = buffers};
  pool->owner = getpid();
  pool->lane = calloc(lanes, sizeof *pool->lane);
  pool->buffer = calloc(lanes * buffers, sizeof *pool->buffer);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->done, NULL);
  int error = !pool->lane || !pool->buffer;
  for (size_t i = 0; i < lanes * buffers && !error; ++i) {
    _Atomic uint32_t *mark = (void *)(marks + i * OOC_MARK);
    atomic_store(mark, 0);
    pool->buffer[i] = (struct buffer){.memory = memory, .mark = mark};
  }
  sigset_t all, before; /* signals go to the threads of Python */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (size_t i = 0; i < lanes && !error; ++i) {
    struct lane *lane = pool->lane + i;
    *lane = (struct lane){
        .pool = pool, .buffers = pool->buffer + i * buffers, .memory = memory + i * pitch, .size = size};
    pthread_mutex_init(&lane->used, NULL);
    error = pthread_create(&lane->thread, NULL, serve, lane);
    pool->lanes += !error;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error)
    ooc_close(pool);
  return error ? NULL : pool;
}

void ooc_begin(struct ooc_pool *pool, struct ooc_block *block) {
  block->error = block->issued = 0;
  block->issued_at = 0;
  block->taken = 0;
  block->unissued = block->count;
  block->unfinished = block->count + 1;
  block->next = NULL;
  pthread_mutex_lock(&pool->mutex);
  if (pool->first)
    pool->last->next = block;
  else
    pool->first = block;
  pool->last = block;
  atomic_store_explicit(&pool->ready, 1, memory_order_relaxed);
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->mutex);
}

static int reached(struct ooc_pool *pool, struct ooc_block *block, bool finished, int wait) {
  pthread_mutex_lock(&pool->mutex);
  bool is = finished ? !block->unfinished : block->issued;
  while (wait && !is) {
    pthread_cond_wait(&pool->done, &pool->mutex);
    is = finished ? !block->unfinished : block->issued;
  }
  pthread_mutex_unlock(&pool->mutex);
  return is;
}

int ooc_issued(struct ooc_pool *pool, struct ooc_block *block, int wait) { return reached(pool, block, false, wait); }

int ooc_finished(struct ooc_pool *pool, struct ooc_block *block, int wait) { return reached(pool, block, true, wait); }

void ooc_take_lane(struct ooc_pool *pool, size_t number) {
  struct lane *lane = pool->lane + number;
  pthread_mutex_lock(&lane->used);
  for (size_t i = 0; i < pool->buffers; ++i)
    await(pool, lane->buffers + i); /* an error is that of the next copy, too */
}

void ooc_give_lane(struct ooc_pool *pool, size_t number) { pthread_mutex_unlock(&pool->lane[number].used); }

void ooc_close(struct ooc_pool *pool) {
  if (pool->owner != getpid())
    return;
  pthread_mutex_lock(&pool->mutex);
  pool->closing = true;
  atomic_store_explicit(&pool->ready, 1, memory_order_relaxed);
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->mutex);
  for (size_t i = 0; i < pool->lanes; ++i)
    pthread_join(pool->lane[i].thread, NULL);
  free(pool->lane);
  free(pool->buffer);
  free(pool);
}
