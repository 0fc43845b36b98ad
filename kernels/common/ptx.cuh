// ptx.cuh: what PTX inside C++ needs.
#pragma once

// A macro's value as text.
#define OOC_TEXT_(x) #x
#define OOC_TEXT(x) OOC_TEXT_(x)

// The address of shared memory by which instructions name it.
__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
