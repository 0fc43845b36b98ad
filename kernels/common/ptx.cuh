// ptx.cuh: helpers for inline PTX.
#pragma once

// The value of a macro as a string literal.
#define OOC_TEXT_(x) #x
#define OOC_TEXT(x) OOC_TEXT_(x)

// The 32-bit address of a pointer into shared memory, as PTX instructions take it.
__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
