// pack.cpp: the kernels that encode a batch of chunks, one after the other on a processor (fibers.hpp).
#include "fibers.hpp"
#include "decoding/copies.cuh"
#include "encoding/bits.cuh"
#include "encoding/matches.cuh"
#include "encoding/streams_in_frames.cuh"
#include "encoding/shuffle.cu"
#undef static_assert
namespace of_lz4 {
#include "encoding/lz4_compress.cu"
}
namespace of_zstd {
#include "encoding/zstd_compress.cu"
}
#include "encoding/locate.cu"
namespace of_all {
#include "encoding/assemble.cu"
}

extern "C" void pack(const encoding_t* given, unsigned blocks) {
    const unsigned streams = given->count * given->streams;
    launch(blocks, [=] { shuffle(*given); }, given->count);
    if (given->compressor == BLOSC_LZ4) {
        launch(streams, [=] { of_lz4::lz4_compress(*given); });
    } else {
        launch(streams, [=] { of_zstd::zstd_compress(*given); });
    }
    launch(1, [=] { locate(*given); });
    launch(streams, [=] { of_all::assemble(*given); });
}
