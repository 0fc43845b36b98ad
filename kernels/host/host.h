/* Functions that the package calls by ctypes, without the GIL. They need no part of Python or CUDA at build
 * time. */

#ifndef OOC_HOST_H
#define OOC_HOST_H

#include <stddef.h>
#include <stdint.h>

/* The version of the sources that the library was compiled from (`scripts/build_host.py`). */
extern const char ooc_sources[];

/* Copies `rows` rows of `size` bytes. Rows start `to_pitch` and `from_pitch` bytes apart. They do not overlap. */
void ooc_copy_rows(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t from_pitch, size_t size, size_t rows);

/* Copies the elements below the diagonal of a square to their mirror images above it, in up to `threads` threads.
 * Elements have `size` bytes, 4 or 8, and rows start `pitch` bytes apart. */
void ooc_mirror(char *square, ptrdiff_t pitch, size_t extent, size_t size, size_t threads);

/* Successive entries of a sparse matrix: those from number `first` to before `last`, which are in `lines` lines. */
struct ooc_entries {
  const int64_t *starts; /* the first entry of each line, and the end of the last line */
  int64_t lines, first, last;
  const void *indices; /* the place of each entry in its line */
  const void *values;
  int64_t left, right; /* the places to make dense */
  int64_t width;       /* of a whole line */
  int index_bytes;     /* 4 or 8 */
  int kind;            /* of the values: the number of a dtype in `_KINDS` of sparse.py */
};

/* Writes the dense elements of lines, which start `pitch` bytes apart. Entries at the same place are added up. A line
 * that begins before `first` already has the elements of its earlier entries. Returns 1 if an entry is outside of its
 * line, else 0. */
int ooc_make_dense(const struct ooc_entries *entries, char *to, ptrdiff_t pitch);

/* Computes moments of `extent` groups of elements. Element i is in the group groups[i], an integer of `index_bytes`
 * bytes, 4 or 8. For each group, it adds to its number of elements, their sum, and the sum of squares of their
 * differences from the mean, all of which are 0 before, and finds extremes, which are infinite before. Returns 1 if a
 * group is no number below `extent`, else 0. */
int ooc_moments(int index_bytes, int64_t count, int64_t extent, const void *groups, const double *x, int64_t *counts,
                double *totals, double *squares, double *low, double *high);

/* A part of a block that one thread copies at a time: `rows` rows from number `row` on, of which `size` bytes
 * each, from byte `at` on. If `rows` is 1, the bytes may go on in the rows behind. */
struct ooc_piece {
  size_t row, rows, at, size;
};

/* Moves a piece between its place on the host and a pinned buffer, in which its rows follow each other. `place`
 * says where the block is. If `cached`, the buffer should be in the caches afterwards. Returns 0 or an errno. Several
 * threads call it at once. */
typedef int (*ooc_move)(const void *place, const struct ooc_piece *piece, char *buffer, int cached);

/* A place in memory: rows of `size` bytes that start `pitch` bytes apart. */
struct ooc_memory {
  char *address;
  ptrdiff_t pitch;
  size_t size;
};

/* `ooc_move` from and to an `ooc_memory`. */
int ooc_from_memory(const void *place, const struct ooc_piece *piece, char *buffer, int cached);
int ooc_to_memory(const void *place, const struct ooc_piece *piece, char *buffer, int cached);

/* Elements of a tile of C, and the elements that have been selected of its rows (SELECTED in
 * oocgemm/backends/base.py). `along` or `down` is 1. */
struct ooc_selection {
  void *kept;          /* `count` elements for each row */
  size_t count, dtype; /* the dtype of the tile's elements: 0 float32, 1 float64, 2 int32 */
  const void *sums;
  ptrdiff_t down, along; /* the distances between elements of neighbouring rows and columns, in elements */
  size_t rows, cols;
  size_t top, left;   /* the row and the column in C of the first element */
  const void *row_factors, *col_factors; /* numbers u and v of the rows and columns of C, or NULL */
  int nearness;      /* scores of elements c are 2 c - (u + v), but at most 0; else c u v, clipped to [-1, 1] */
  int excludes_self; /* whether elements on C's diagonal are left out */
};

/* Updates the selected elements, by at most `threads` threads. Returns 0 or ENOMEM. */
int ooc_select(const struct ooc_selection *selection, size_t threads);

/* Pairs of a row of x and a row of y. Rows start `x_pitch` and `y_pitch` bytes apart, and are multiplied by scales. */
struct ooc_pairs {
  const char *x, *y;
  ptrdiff_t x_pitch, y_pitch;
  const double *x_scales, *y_scales; /* or NULL */
  const int64_t *x_at, *y_at;        /* pair number i is that of the rows x_at[i / each] and y_at[i] */
  size_t each, count, width;         /* pairs and columns */
  int dtype;                         /* of the elements: 0 float32, 1 float64, 2 int8 */
};

/* Adds the squared distance of each pair to `sums`, by at most `threads` threads. Sums are added up in an order that
 * depends on the number of columns alone. */
void ooc_add_distances(const struct ooc_pairs *pairs, double *sums, size_t threads);

/* Sorts the `count` candidates of each row by their distances, NaN last, and equally near ones by their indices.
 * Returns 0 or ENOMEM. */
int ooc_sort_candidates(double *distances, int64_t *indices, size_t rows, size_t count, size_t threads);

/* A step of an epilogue (oocgemm/planning/sinks.py). Its numbers per row and per column of C may be NULL, for 1. */
enum { OOC_SCALE, OOC_RANK_ONE, OOC_CORRELATION, OOC_SQUARED, OOC_WITHIN };
struct ooc_step {
  size_t kind;
  const double *rows, *cols;
  double value;
};

/* A strip of C, whose elements follow one another row by row: alpha times `sums`, and what the steps make of it. Both
 * are float, or double if the flags are set. They may be the same array. */
struct ooc_chain {
  const void *sums;
  void *result;
  size_t sums_double, result_double, height, width;
  double alpha;
  const struct ooc_step *steps;
  size_t count;
};

/* Computes the result in double precision, by at most `threads` threads. */
void ooc_run_chain(const struct ooc_chain *chain, size_t threads);

/* CUDA's struct CUDA_MEMCPY2D: a copy of `height` rows of `width` bytes. */
struct ooc_end {
  size_t x, y;
  unsigned kind;
  const void *host;
  uint64_t address;
  void *array;
  size_t pitch;
};
struct ooc_rectangle {
  struct ooc_end from, to;
  size_t width, height;
};

/* The functions of the CUDA driver that a pool calls: cuCtxSetCurrent, cuMemcpyAsync, cuMemcpy2DAsync,
 * cuStreamWriteValue32, cuStreamQuery, cuEventRecord and cuStreamWaitEvent. Each returns 0 or an error. */
struct ooc_driver {
  int (*enter)(void *context);
  int (*copy)(uint64_t to, uint64_t from, size_t size, void *stream);
  int (*copy_rows)(const struct ooc_rectangle *rectangle, void *stream);
  int (*write)(void *stream, uint64_t address, uint32_t value, unsigned flags);
  int (*query)(void *stream);
  int (*record)(void *event, void *stream);
  int (*wait)(void *stream, void *event, unsigned flags);
};

/* A block that is copied. The caller sets the first fields, and keeps all of it, and what it points to, until the
 * block is finished. */
struct ooc_block {
  ooc_move move;
  const void *place;
  const struct ooc_piece *pieces; /* all of them, or NULL if the pool may cut the block anywhere */
  size_t bytes;     /* of the block, at least 1 */
  uint64_t device;  /* address of the block on the device, where its rows follow each other */
  size_t row_bytes; /* of the whole block */
  void **waits;     /* events that the copies wait for */
  size_t wait_count;
  void *start, *end; /* events, which are recorded before the first copy, and after all copies */
  /* Set by the pool. An error is that of the driver if positive, an errno if negative. No piece is copied after the
   * first error. */
  int error;
  int issued;        /* whether all copies have been issued, and the end recorded */
  int64_t started_at; /* when its start was recorded, in nanoseconds of the monotonic clock */
  size_t cut, taken, inside, unfinished;
  struct ooc_block *next;
};

/* What a thread of a pool copies by. All copies are on its stream. Its `size` bytes of pinned memory hold the pieces
 * that are in flight. A piece has at most `size` bytes. `mark` is in pinned memory, too. `event` is the lane's own. */
struct ooc_lane {
  char *memory;
  size_t size;
  uint32_t *mark;
  void *stream, *event;
};

/* Threads that copy blocks in one direction, one per lane. */
struct ooc_pool;

/* Starts the threads. The ends of blocks are recorded on the stream `ends`. Returns NULL if a thread cannot be
 * started. */
struct ooc_pool *ooc_open(const struct ooc_driver *driver, void *context, int uploads, void *ends, size_t lanes,
                          const struct ooc_lane *given);

/* Begins to copy a block. */
void ooc_begin(struct ooc_pool *pool, struct ooc_block *block);

/* Waits until all copies of a block have been issued (`ooc_issued`), or until all pieces have also been written to
 * their place on the host (`ooc_finished`). With `wait` 0, they return at once. They return whether that is so. */
int ooc_issued(struct ooc_pool *pool, struct ooc_block *block, int wait);
int ooc_finished(struct ooc_pool *pool, struct ooc_block *block, int wait);

/* Another thread takes a lane, whose own thread then copies nothing. No copy from or to its buffers is in flight
 * then, nor when the same thread gives the lane back. */
void ooc_take_lane(struct ooc_pool *pool, size_t lane);
void ooc_give_lane(struct ooc_pool *pool, size_t lane);

/* Ends the threads. All blocks must be finished. In a process that was forked since, it does nothing. */
void ooc_close(struct ooc_pool *pool);

#endif
