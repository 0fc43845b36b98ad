// ptx.cuh: helpers for inline PTX.
#pragma once

// OOC_TEXT turns the value of a macro into a string literal, to insert it into PTX text.
#define OOC_TEXT_(x) #x
#define OOC_TEXT(x) OOC_TEXT_(x)

// Converts a pointer into shared memory to the 32-bit address that PTX instructions take.
__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
