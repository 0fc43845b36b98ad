/* Copies between places in host memory. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define STREAMS 1
#endif

#include "host.h"

/* Copies of at least this many bytes bypass the caches: the target is read next by a copy engine, or not soon. */
#define MIN_STREAMED ((size_t)4096)

#ifdef STREAMS
/* Copies multiples of 256 bytes to multiples of 64 bytes, by loads and stores of `WIDTH` bytes. */
#define STREAM(NAME, TARGET, WIDTH, VECTOR, LOAD, STORE)                              \
  TARGET static void NAME(char *to, const char *from, size_t size) {                  \
    for (; size; to += 256, from += 256, size -= 256)                                 \
      for (int i = 0; i < 256; i += 4 * WIDTH) {                                      \
        VECTOR a = LOAD((const void *)(from + i));                                    \
        VECTOR b = LOAD((const void *)(from + i + WIDTH));                            \
        VECTOR c = LOAD((const void *)(from + i + 2 * WIDTH));                        \
        VECTOR d = LOAD((const void *)(from + i + 3 * WIDTH));                        \
        STORE((void *)(to + i), a);                                                   \
        STORE((void *)(to + i + WIDTH), b);                                           \
        STORE((void *)(to + i + 2 * WIDTH), c);                                       \
        STORE((void *)(to + i + 3 * WIDTH), d);                                       \
      }                                                                               \
  }
STREAM(stream_sse2, , 16, __m128i, _mm_loadu_si128, _mm_stream_si128)
/* On a Xeon, these copied 1.2 times as fast, by 8 threads. */
STREAM(stream_avx512, __attribute__((target("avx512f"))), 64, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#endif

/* Copies bytes without reading the target's cache lines first, which saves a third of the traffic of memory. Other
 * threads see them after `end_streams`. */
static void copy_streamed(char *to, const char *from, size_t size) {
#ifdef STREAMS
  size_t head = (size_t)(-(uintptr_t)to & 63);
  memcpy(to, from, head);
  to += head, from += head, size -= head;
  size_t whole = size & ~(size_t)255;
  if (__builtin_cpu_supports("avx512f"))
    stream_avx512(to, from, whole);
  else
    stream_sse2(to, from, whole);
  to += whole, from += whole, size -= whole;
#endif
  memcpy(to, from, size);
}

static void end_streams(void) {
#ifdef STREAMS
  _mm_sfence();
#endif
}

static void copy_run(char *to, const char *from, size_t size) {
  if (size < MIN_STREAMED)
    memcpy(to, from, size);
  else
    copy_streamed(to, from, size);
}

void ooc_copy_rows(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t from_pitch, size_t size, size_t rows) {
  if (to_pitch == (ptrdiff_t)size && from_pitch == (ptrdiff_t)size) {
    size *= rows;
    rows = rows > 0;
  }
  for (size_t i = 0; i < rows; ++i, to += to_pitch, from += from_pitch)
    copy_run(to, from, size);
  end_streams();
}

/* Returns the bytes of a piece up to where it goes on in the next row; all of them if there are no gaps between rows. */
static size_t first_run(const struct ooc_memory *of, const struct ooc_piece *piece, char **address) {
  size_t row = of->pitch == (ptrdiff_t)of->size ? 0 : piece->at / of->size, within = piece->at - row * of->size;
  *address = of->address + (ptrdiff_t)row * of->pitch + within;
  size_t run = of->size - within;
  return of->pitch == (ptrdiff_t)of->size || run > piece->size ? piece->size : run;
}

int ooc_from_memory(const void *place, const struct ooc_piece *piece, char *buffer, int cached) {
  const struct ooc_memory *of = place;
  char *from;
  for (size_t run = first_run(of, piece, &from), left = piece->size; left;) {
    if (cached)
      memcpy(buffer, from, run);
    else
      copy_run(buffer, from, run);
    buffer += run, left -= run;
    from += (ptrdiff_t)run + of->pitch - (ptrdiff_t)of->size;
    run = left < of->size ? left : of->size;
  }
  end_streams();
  return 0;
}

int ooc_to_memory(const void *place, const struct ooc_piece *piece, char *buffer, int cached) {
  (void)cached;
  const struct ooc_memory *of = place;
  char *to;
  for (size_t run = first_run(of, piece, &to), left = piece->size; left;) {
    copy_run(to, buffer, run);
    buffer += run, left -= run;
    to += (ptrdiff_t)run + of->pitch - (ptrdiff_t)of->size;
    run = left < of->size ? left : of->size;
  }
  end_streams();
  return 0;
}
