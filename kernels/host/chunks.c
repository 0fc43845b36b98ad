/* Reads blocks of matrices whose elements are in files, as far as the page cache has them. Reads their status. */

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "chunks.h"

#ifndef RWF_NOWAIT /* only Linux can say what the page cache has */
#define RWF_NOWAIT 0
#define preadv2(file, places, count, offset, flags) preadv(file, places, count, offset)
#endif

#define PATH_BYTES 4096
/* Lines with short gaps between them, and short lines, are read together into a buffer, which fits into the cache of
 * a processor, and copied from there. A call for each takes longer. */
#define BUFFER_BYTES (128 << 10)
#define MAX_STRIDE (BUFFER_BYTES / 4)
#define MAX_GAP 8192
/* Lines that one call scatters. */
#define MAX_LINES 256

/* Lines of a file that are equally far apart there, and equally far apart in memory. */
struct lines {
  int file;
  int64_t offset, stride; /* the first byte of the first line in the file; the distance of lines there */
  int64_t size, count;    /* the needed bytes of each line; the number of lines */
  char *to;
  int64_t pitch; /* the distance of lines in memory */
};

/* Fills memory with bytes of a file. Fails if the page cache does not have them. Where the system cannot say what
 * it has, as for tmpfs, the call waits for the disk if `may_wait`, and else fails. */
static bool read_bytes(int file, char *to, int64_t size, int64_t offset, bool may_wait) {
  int flags = RWF_NOWAIT;
  while (size > 0) {
    struct iovec place = {to, (size_t)size};
    ssize_t found = preadv2(file, &place, 1, offset, flags);
    if (found > 0)
      to += found, offset += found, size -= found;
    else if (found < 0 && errno == EOPNOTSUPP && flags && may_wait)
      flags = 0;
    else if (found == 0 || errno != EINTR)
      return false;
  }
  return true;
}

/* Reads lines by way of a buffer, with the bytes between them. */
static bool copy_lines(struct lines x) {
  char buffer[BUFFER_BYTES];
  int64_t room = BUFFER_BYTES / x.stride;
  while (x.count > 0) {
    int64_t count = x.count < room ? x.count : room;
    if (!read_bytes(x.file, buffer, (count - 1) * x.stride + x.size, x.offset, true))
      return false;
    for (int64_t i = 0; i < count; ++i)
      memcpy(x.to + i * x.pitch, buffer + i * x.stride, (size_t)x.size);
    x.count -= count, x.offset += count * x.stride, x.to += count * x.pitch;
  }
  return true;
}

/* Reads lines that are adjacent in the file, many by each call. */
static bool scatter_lines(struct lines x) {
  struct iovec places[MAX_LINES];
  int flags = RWF_NOWAIT;
  while (x.count > 0) {
    int count = x.count < MAX_LINES ? (int)x.count : MAX_LINES;
    for (int i = 0; i < count; ++i)
      places[i] = (struct iovec){x.to + i * x.pitch, (size_t)x.size};
    ssize_t found = preadv2(x.file, places, count, x.offset, flags);
    if (found < 0 && errno == EOPNOTSUPP && flags)
      flags = 0;
    else if (found != count * x.size)
      return false;
    else
      x.count -= count, x.offset += found, x.to += count * x.pitch;
  }
  return true;
}

/* `min_scattered`: the least bytes of adjacent lines that are scattered, not copied from a buffer. */
static bool read_lines(struct lines x, int64_t min_scattered) {
  bool whole = x.size == x.stride;
  if (x.count == 1 || (whole && x.size == x.pitch))
    return read_bytes(x.file, x.to, x.size * x.count, x.offset, true);
  if (x.stride <= MAX_STRIDE && (whole ? x.size < min_scattered : x.stride - x.size <= MAX_GAP))
    return copy_lines(x);
  if (whole)
    return scatter_lines(x);
  for (int64_t i = 0; i < x.count; ++i)
    if (!read_bytes(x.file, x.to + i * x.pitch, x.size, x.offset + i * x.stride, false))
      return false;
  return true;
}

static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
static int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

static bool refuses_links;
void ooc_refuse_links(int refuse) { refuses_links = refuse; }

/* O_NONBLOCK has no effect on regular files, and opens a named pipe at once. */
static int open_at_once(const char *path) {
  int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
#ifdef SYS_openat2
  if (refuses_links) {
    struct {
      uint64_t flags, mode, resolve;
    } how = {(uint64_t)flags, 0, 4}; /* RESOLVE_NO_SYMLINKS */
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
  }
#endif
  return refuses_links ? -1 : open(path, flags);
}

/* Opens a regular file. Returns its descriptor, or -1 if that fails or the file has fewer bytes, or not as many as
 * `exact` demands. */
static int open_file(const char *path, int64_t bytes, bool exact) {
  int file = open_at_once(path);
  if (file < 0)
    return -1;
  struct stat status;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
      (status.st_size == bytes || (status.st_size > bytes && !exact)))
    return file;
  close(file);
  return -1;
}

/* Returns whether there is room for the path of the file of a chunk. */
static bool make_path(char to[PATH_BYTES], const char *path, const char *separator, int64_t i, int64_t j) {
  return snprintf(to, PATH_BYTES, "%s%lld%s%lld", path, (long long)i, separator, (long long)j) < PATH_BYTES;
}

static int open_chunk(const struct ooc_chunks *x, int64_t i, int64_t j) {
  char path[PATH_BYTES];
  return make_path(path, x->path, x->separator, i, j) ? open_file(path, x->bytes, true) : -1;
}

/* Reads the part of a block that is in chunk (i, j), which begins at `offset` of a file. */
static bool read_chunk(const struct ooc_chunks *x, int file, int64_t offset, int64_t i, int64_t j,
                       const struct ooc_area *area) {
  int64_t top = most(area->top, i * x->height), bottom = least(area->bottom, (i + 1) * x->height);
  int64_t left = most(area->left, j * x->width), right = least(area->right, (j + 1) * x->width);
  char *to = area->to + (top - area->top) * area->pitch + left - area->left;
  offset += (top - i * x->height) * x->width + left - j * x->width;
  struct lines lines = {file, offset, x->width, right - left, bottom - top, to, area->pitch};
  return read_lines(lines, x->min_scattered);
}

int64_t ooc_read_chunks(const struct ooc_chunks *x, const struct ooc_area *area, int64_t *failed) {
  int64_t number = 0, failures = 0;
  int shared = x->separator ? -1 : open_file(x->path, x->bytes, false);
  for (int64_t i = area->top / x->height; i * x->height < area->bottom; ++i)
    for (int64_t j = area->left / x->width; j * x->width < area->right; ++j, ++number) {
      int file = x->separator ? open_chunk(x, i, j) : shared;
      int64_t offset = x->offsets ? x->offsets[i * x->across + j] : x->offset;
      if (file < 0 || offset < 0 || !read_chunk(x, file, offset, i, j, area)) {
        if (failed)
          failed[failures] = number;
        ++failures;
      }
      if (x->separator && file >= 0)
        close(file);
    }
  if (shared >= 0)
    close(shared);
  return failures;
}

int ooc_from_chunks(const void *given, const struct ooc_piece *piece, char *buffer, int cached) {
  (void)cached;
  const struct ooc_stored *place = given;
  int64_t top = place->top + (int64_t)piece->row, left = place->left + (int64_t)piece->at, size = (int64_t)piece->size;
  struct ooc_area area = {top, top + (int64_t)piece->rows, left, left + size, buffer, size};
  return ooc_read_chunks(place->chunks, &area, NULL) ? EAGAIN : 0;
}

static long long nanoseconds(struct timespec at) { return at.tv_sec * 1000000000LL + at.tv_nsec; }

void ooc_stat_chunks(const char *path, const char *separator, int64_t first, int64_t end, int64_t every,
                     int64_t across, char *content, char *changes) {
  char file[PATH_BYTES];
  struct stat status;
  *content = *changes = 0;
  for (int64_t number = first; number < end; number += every) {
    if (make_path(file, path, separator, number / across, number % across) && stat(file, &status) == 0) {
      content += sprintf(content, "%lld %lld;", (long long)status.st_size, nanoseconds(status.st_mtim));
      changes += sprintf(changes, "%lld;", nanoseconds(status.st_ctim));
    } else {
      content += sprintf(content, "-");
      changes += sprintf(changes, "-");
    }
  }
}
