/* Threads that copy blocks between the host and the device, piece by piece through pinned memory.
 *
 * Each thread has a lane: pinned memory, and a stream. To upload, a thread moves a piece into the memory, and issues its
 * copy to the device on the stream. While the device copies, the thread moves the next piece. To download, a thread
 * issues the copies of several pieces, and moves the pieces to their places as the copies end. With one stream per
 * thread, the link begins a copy while it ends another one.
 *
 * Pieces go through the memory of a lane one behind the other, and begin anew at its end. So a piece is no more in the
 * caches of the core when the link copies to its memory again: such copies would be three times as slow.
 *
 * After each copy, the device writes the number of the copy to the mark of the lane, in host memory. A thread that waits
 * for the copy reads the mark. To ask the driver would make all threads wait that call it, since it has one lock.
 *
 * A lane enters a block when it takes a piece of it, and leaves it when it takes no further one. Its stream waits for
 * the events of the block when it enters. When it leaves, the stream of all ends waits for what it has issued. The
 * lane that leaves as the last one records the end of the block on that stream.
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
/* Pieces of a lane that may be in flight: a power of two. */
#define FLIGHT 16
/* To download, a lane with this many pieces in flight takes another one only if every lane has as much left to take. */
#define FEW 2
/* Bytes of a piece of a block in memory. The link copies large pieces faster, but gets the first small piece sooner, and
 * the host has written the last small piece sooner. */
#define MIN_PIECE ((size_t)512 << 10)
#define MAX_PIECE ((size_t)4 << 20)
/* Uploads write pieces past the caches until this many bytes have followed each other without a pause. Then pieces of
 * at least MIN_CACHED bytes are written to the last cache, from which the link reads them. At first, the pinned memory
 * is in no cache, so that the host would read it before. Smaller pieces would still be in the core's own cache, from
 * which the link reads slowly. */
#define WARM ((size_t)256 << 20)
#define MIN_CACHED ((size_t)1 << 20)
/* CUDA_ERROR_NOT_READY, and CU_MEMORYTYPE_UNIFIED: the driver itself finds out whether an address is on the host. */
enum { NOT_READY = 600, UNIFIED = 4 };

/* A piece whose copy has been issued. */
struct flight {
  size_t begin, end;       /* its bytes in the memory of the lane */
  struct ooc_block *block; /* for which the piece is downloaded, or NULL */
  struct ooc_piece piece;
};

struct lane {
  struct ooc_pool *pool;
  pthread_t thread;
  pthread_mutex_t used; /* held by the thread that uses the lane */
  struct ooc_lane given;
  _Atomic uint32_t *mark;
  struct ooc_block *inside; /* the block that the lane has entered, or NULL */
  size_t at;                /* where in the memory the next piece begins */
  bool cached;              /* whether the piece to upload is written to the caches */
  /* The copies are numbered. Copy n is flight[n % FLIGHT]. Those from `oldest` to before `next` are in flight. */
  uint32_t oldest, next;
  size_t bytes; /* in flight */
  struct flight flight[FLIGHT];
};

struct ooc_pool {
  struct ooc_driver driver;
  void *context, *ends; /* the stream on which the ends of blocks are recorded */
  bool uploads, closing;
  size_t lanes; /* whose threads have been started */
  struct lane *lane;
  pid_t owner;
  pthread_mutex_t mutex;
  pthread_cond_t work, done;
  struct ooc_block *first, *last; /* with pieces that no thread has taken */
  size_t left;                    /* bytes of these pieces */
  size_t issuing;                 /* blocks with copies that have not been issued */
  size_t taken;                   /* bytes of pieces that were taken since there was no such block */
  atomic_int ready;               /* whether threads need not wait for work */
};

static int64_t now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

/* Counts the bytes of a piece as finished. The block may be gone afterwards. */
static void count_finished(struct ooc_pool *pool, struct ooc_block *block, size_t bytes) {
  pthread_mutex_lock(&pool->mutex);
  if ((block->unfinished -= bytes) == 0)
    pthread_cond_broadcast(&pool->done);
  pthread_mutex_unlock(&pool->mutex);
}

static void fail(struct ooc_pool *pool, struct ooc_block *block, int error) {
  if (!error)
    return;
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

/* Lets a lane enter a block. */
static void enter(struct lane *lane, struct ooc_block *block) {
  struct ooc_pool *pool = lane->pool;
  lane->inside = block;
  int error = 0;
  for (size_t i = 0; i < block->wait_count && !error; ++i)
    error = pool->driver.wait(lane->given.stream, block->waits[i], 0);
  fail(pool, block, error);
}

/* Lets a lane leave the block that it has entered. If no other lane has pieces to issue, that is the end. */
static void leave(struct lane *lane) {
  struct ooc_pool *pool = lane->pool;
  struct ooc_block *block = lane->inside;
  lane->inside = NULL;
  int error = pool->driver.record(lane->given.event, lane->given.stream);
  if (!error)
    error = pool->driver.wait(pool->ends, lane->given.event, 0);
  fail(pool, block, error);
  pthread_mutex_lock(&pool->mutex);
  bool last = --block->inside == 0 && block->taken == block->bytes;
  pthread_mutex_unlock(&pool->mutex);
  if (!last)
    return;
  fail(pool, block, pool->driver.record(block->end, pool->ends));
  pthread_mutex_lock(&pool->mutex);
  block->issued = 1;
  --block->unfinished; /* it counts the event as one more byte */
  --pool->issuing;
  pthread_cond_broadcast(&pool->done);
  pthread_mutex_unlock(&pool->mutex);
}

static void sleep_for(int64_t nanoseconds) {
  struct timespec time = {.tv_sec = 0, .tv_nsec = nanoseconds};
  nanosleep(&time, NULL);
}

/* Waits until the oldest copy in flight of a lane has ended. */
static int await(struct lane *lane) {
  int64_t start = now(), checked = start - CHECK;
  while ((int32_t)(atomic_load_explicit(lane->mark, memory_order_acquire) - lane->oldest) <= 0) {
    int64_t waited = now() - start;
    if (waited < SPIN) {
      RELAX();
      continue;
    }
    if (now() - checked > CHECK) {
      int status = lane->pool->driver.query(lane->given.stream);
      if (status && status != NOT_READY)
        return status;
      checked = now();
    }
    sleep_for(waited < 40 * SPIN ? SPIN / 2 : 2 * SPIN);
  }
  return 0;
}

/* Waits for the oldest copy in flight of a lane, and moves the piece to its place if it was downloaded. */
static int finish(struct lane *lane) {
  struct ooc_pool *pool = lane->pool;
  struct flight *flight = lane->flight + lane->oldest % FLIGHT;
  struct ooc_block *block = flight->block;
  int error = await(lane);
  ++lane->oldest;
  lane->bytes -= flight->end - flight->begin;
  if (block) {
    if (!error && !has_failed(pool, block))
      error = -block->move(block->place, &flight->piece, lane->given.memory + flight->begin, 0);
    fail(pool, block, error);
    count_finished(pool, block, flight->end - flight->begin);
  }
  return error > 0 ? error : 0; /* of the device */
}

/* Finishes pieces until none is between two places in the memory of a lane, and there may be one more in flight. */
static int make_room(struct lane *lane, size_t begin, size_t end) {
  int error = 0;
  while (!error && lane->next != lane->oldest) {
    struct flight *oldest = lane->flight + lane->oldest % FLIGHT;
    if (lane->next - lane->oldest < FLIGHT && (oldest->begin >= end || begin >= oldest->end))
      break;
    error = finish(lane);
  }
  return error;
}

/* Finds room for a piece in the memory of a lane, behind the latest one. */
static int place(struct lane *lane, size_t size) {
  int error = 0;
  if (lane->at + size > lane->given.size) {
    error = make_room(lane, lane->at, lane->given.size);
    lane->at = 0;
  }
  return error ? error : make_room(lane, lane->at, lane->at + size);
}

/* Issues the copy of a piece between a lane and the device. */
static int copy(struct lane *lane, struct ooc_block *block, const struct ooc_piece *piece, size_t size) {
  struct ooc_pool *pool = lane->pool;
  void *stream = lane->given.stream;
  uint64_t there = block->device + piece->row * block->row_bytes + piece->at;
  uint64_t here = (uintptr_t)lane->given.memory + lane->at;
  int error;
  if (piece->size == block->row_bytes || piece->rows == 1) {
    error = pool->uploads ? pool->driver.copy(there, here, size, stream) : pool->driver.copy(here, there, size, stream);
  } else {
    struct ooc_end device = {.kind = UNIFIED, .address = there, .pitch = block->row_bytes};
    struct ooc_end host = {.kind = UNIFIED, .address = here, .pitch = piece->size};
    struct ooc_rectangle copied = {
        pool->uploads ? host : device, pool->uploads ? device : host, piece->size, piece->rows};
    error = pool->driver.copy_rows(&copied, stream);
  }
  if (error)
    return error;
  error = pool->driver.write(stream, (uintptr_t)lane->given.mark, lane->next + 1, 0);
  if (error) /* the memory can be used again when the copy has ended */
    while (pool->driver.query(stream) == NOT_READY)
      sleep_for(SPIN);
  return error;
}

/* Records the start of a block: of the first move to upload, and of the first copy to download. */
static int begin(struct lane *lane, struct ooc_block *block, const struct ooc_piece *piece) {
  if (piece->row || piece->at)
    return 0;
  block->started_at = now();
  return lane->pool->driver.record(block->start, lane->given.stream);
}

/* Copies a piece by the means of a lane; to download, up to where its copy is issued. */
static void handle(struct lane *lane, struct ooc_block *block, const struct ooc_piece *piece) {
  struct ooc_pool *pool = lane->pool;
  size_t size = piece->rows * piece->size;
  bool issued = false;
  if (!has_failed(pool, block)) {
    int error = place(lane, size);
    if (!error)
      error = begin(lane, block, piece);
    if (!error && pool->uploads)
      error = -block->move(block->place, piece, lane->given.memory + lane->at, lane->cached);
    if (!error)
      error = copy(lane, block, piece, size);
    issued = !error;
    fail(pool, block, error);
  }
  if (issued) {
    lane->flight[lane->next++ % FLIGHT] =
        (struct flight){lane->at, lane->at + size, pool->uploads ? NULL : block, *piece};
    lane->bytes += size;
    lane->at += (size + 63) & ~(size_t)63;
  }
  if (pool->uploads || !issued)
    count_finished(pool, block, size);
}

static size_t least(size_t x, size_t y) { return x < y ? x : y; }

/* Cuts the next piece from a block: one of its list, or a range of its bytes. The first ranges grow, and the last ones
 * shrink, so that threads begin and end at about the same time. */
static struct ooc_piece cut(const struct ooc_pool *pool, const struct ooc_block *block) {
  if (block->pieces)
    return block->pieces[block->cut];
  size_t size = least(MIN_PIECE + pool->taken / pool->lanes, pool->left / (2 * pool->lanes));
  size = size < MIN_PIECE ? MIN_PIECE : least(size, MAX_PIECE) & ~(size_t)4095;
  size = least(least(size, pool->lane->given.size / 2), block->bytes - block->taken);
  return (struct ooc_piece){.rows = 1, .at = block->taken, .size = size};
}

/* Takes a piece that no thread has taken; returns its block, or NULL. The lane enters it, and leaves the one before. */
static struct ooc_block *take(struct lane *lane, struct ooc_piece *piece) {
  struct ooc_pool *pool = lane->pool;
  pthread_mutex_lock(&pool->mutex);
  struct ooc_block *block = pool->first;
  size_t pending = pool->uploads ? 0 : lane->next - lane->oldest;
  if (block && pending >= FEW && lane->bytes * 2 * pool->lanes >= pool->left)
    block = NULL;
  if (block) {
    *piece = cut(pool, block);
    size_t size = piece->rows * piece->size;
    ++block->cut;
    block->taken += size;
    pool->taken += size;
    pool->left -= size;
    lane->cached = pool->taken > WARM && size >= MIN_CACHED;
    block->inside += block != lane->inside;
    if (block->taken == block->bytes) {
      pool->first = block->next;
      if (!pool->first)
        atomic_store_explicit(&pool->ready, pool->closing, memory_order_relaxed);
    }
  }
  pthread_mutex_unlock(&pool->mutex);
  if (lane->inside && block != lane->inside)
    leave(lane);
  if (block && block != lane->inside)
    enter(lane, block);
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
    struct ooc_piece piece;
    pthread_mutex_lock(&lane->used);
    while ((block = take(lane, &piece)) || (!pool->uploads && lane->next != lane->oldest)) {
      if (!block) {
        finish(lane);
        continue;
      }
      fail(pool, block, entered);
      handle(lane, block, &piece);
    }
    pthread_mutex_unlock(&lane->used);
  }
  return NULL;
}

struct ooc_pool *ooc_open(const struct ooc_driver *driver, void *context, int uploads, void *ends, size_t lanes,
                          const struct ooc_lane *given) {
  struct ooc_pool *pool = calloc(1, sizeof *pool);
  if (!pool)
    return NULL;
  *pool = (struct ooc_pool){.driver = *driver, .context = context, .uploads = uploads != 0, .ends = ends};
  pool->owner = getpid();
  pool->lane = calloc(lanes, sizeof *pool->lane);
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->done, NULL);
  int error = !pool->lane;
  sigset_t all, before; /* signals go to the threads of Python */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (size_t i = 0; i < lanes && !error; ++i) {
    struct lane *lane = pool->lane + i;
    *lane = (struct lane){.pool = pool, .given = given[i], .mark = (void *)given[i].mark};
    atomic_store(lane->mark, 0);
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
  block->started_at = 0;
  block->cut = block->taken = block->inside = 0;
  block->unfinished = block->bytes + 1;
  block->next = NULL;
  pthread_mutex_lock(&pool->mutex);
  if (pool->first)
    pool->last->next = block;
  else
    pool->first = block;
  pool->last = block;
  pool->left += block->bytes;
  if (!pool->issuing++)
    pool->taken = 0;
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
  while (lane->next != lane->oldest)
    finish(lane); /* an error is that of the next copy, too */
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
  free(pool);
}
