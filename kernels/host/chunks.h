/* Blocks of matrices whose elements are in files. */

#ifndef OOC_CHUNKS_H
#define OOC_CHUNKS_H

#include <stdint.h>

#include "host.h"

/* Where the chunks of a matrix are. Each has `height` rows of `width` bytes, without gaps. */
struct ooc_chunks {
  const char *path;       /* of the file with all chunks; or the beginning of the paths of files of one chunk each */
  const char *separator;  /* ends such a path: the chunk's row in the grid, `separator`, its column; or NULL */
  int64_t height, width;
  int64_t bytes;          /* of each chunk's file; or the least bytes of the file with all chunks */
  int64_t offset;         /* the first byte of a chunk in its file */
  const int64_t *offsets; /* the first bytes of all chunks, row by row of the grid, -1 for a missing one; or NULL */
  int64_t across;         /* chunks per row of the grid; 0 without `offsets` */
  int64_t min_scattered;  /* Shorter rows are read into a buffer first, if those in memory are apart. */
};

/* Rows of a matrix, and some bytes of each; and the memory for them, where rows are `pitch` bytes apart. */
struct ooc_area {
  int64_t top, bottom, left, right;
  char *to;
  int64_t pitch;
};

/* Reads a block of a matrix from the page cache. Returns how many chunks it could not read, because their bytes are
 * not there, or because a file is missing or has another size, or for another reason. `failed`, if it is not NULL, gets
 * their numbers: the chunks of the block are counted row by row. */
int64_t ooc_read_chunks(const struct ooc_chunks *chunks, const struct ooc_area *area, int64_t *failed);

/* With `refuse` not 0, files are not opened from now on whose path has a symbolic link in any part. */
void ooc_refuse_links(int refuse);

/* A block that begins in row `top` of a matrix, at byte `left` of the row. */
struct ooc_stored {
  const struct ooc_chunks *chunks;
  int64_t top, left;
};

/* `ooc_move` from an `ooc_stored`. Returns EAGAIN if it could not read a chunk. */
int ooc_from_chunks(const void *place, const struct ooc_piece *piece, char *buffer, int cached);

/* Writes the sizes and modification times of files of chunks to `content`, as "SIZE TIME;", and the change times of
 * their inodes to `changes`, as "TIME;", in nanoseconds; for a file whose status is unknown, "-". The files are
 * those of every `every`-th chunk from `first` to before `end`, where a row of the grid has `across` chunks. `path` and
 * `separator` are as in `struct ooc_chunks`. Both texts have room for OOC_STATUS_BYTES per file, and end with a zero. */
#define OOC_STATUS_BYTES 48
void ooc_stat_chunks(const char *path, const char *separator, int64_t first, int64_t end, int64_t every,
                     int64_t across, char *content, char *changes);

#endif
