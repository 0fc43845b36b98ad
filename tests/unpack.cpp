// unpack.cpp: the kernels that decode a batch of chunks, one after the other on a processor (fibers.hpp).
//
// Macros: ITEM, bytes of an element.
#include "fibers.hpp"
#include "decoding/frames.cu"
#undef static_assert
namespace decoding_zstd {
#include "decoding/zstd.cu"
}

extern "C" void unpack(const batch_t* batch, unsigned warps) {
    launch(batch->count, [=] { frames(*batch); });
    launch(warps, [=] { decoding_zstd::zstd_walk(*batch); });
    launch(warps, [=] { decoding_zstd::zstd_entropy(*batch); });
    launch(warps, [=] { decoding_zstd::zstd_execute(*batch); });
}
