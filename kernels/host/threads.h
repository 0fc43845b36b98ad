/* Threads of a function, which share its work and end with it. */

#ifndef OOC_THREADS_H
#define OOC_THREADS_H

#include <stddef.h>

#define ALWAYS static inline __attribute__((always_inline))
/* Compiles a function once more, for processors with AVX2. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* Returns how many threads `ooc_share` starts, if so many are wanted: at least one. */
size_t ooc_threads(size_t wanted);

/* Calls `work` in each of `threads` threads (`ooc_threads`), with its part of the numbers from 0 to before `count` and
 * with the number of the thread. A thread that cannot be started leaves its part to the caller. */
void ooc_share(size_t count, size_t threads, void (*work)(void *given, size_t from, size_t to, size_t thread),
               void *given);

#endif
