// unpack.cpp: the kernels that decode a batch of chunks, one after the other on a processor (fibers.hpp).
#include "fibers.hpp"
#include "decoding/crc32c.cu"
#include "decoding/frames.cu"
#undef static_assert
namespace of_zstd {
#include "decoding/zstd.cu"
}
namespace of_all {
#include "decoding/execute.cu"
}
namespace of_lz4 {
#include "decoding/lz4.cu"
}

extern "C" void unpack(const batch_t* batch, unsigned warps, bool lz4) {
    if (batch->chunks->checksum) launch(PARTS * batch->count, [=] { crc32c(*batch); });
    launch(batch->count, [=] { frames(*batch); });
    if (lz4) {
        launch(warps, [=] { of_lz4::lz4_parse(*batch); });
    } else {
        launch(warps, [=] { of_zstd::zstd_walk(*batch); });
        launch(warps, [=] { of_zstd::zstd_entropy(*batch); });
    }
    launch(warps, [=] { of_all::execute(*batch); });
}
