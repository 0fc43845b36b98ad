/* Functions that the package calls by ctypes, without the GIL. They keep no state between calls, and need no
 * part of Python or CUDA at build time. */

#ifndef OOC_HOST_H
#define OOC_HOST_H

#include <stddef.h>

/* Copies `rows` rows of `size` bytes. Rows start `to_pitch` and `from_pitch` bytes apart. They do not overlap. */
void ooc_copy_rows(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t from_pitch, size_t size, size_t rows);

/* The version of the sources that the library was compiled from (`scripts/build_host.py`). */
extern const char ooc_sources[];

#endif
