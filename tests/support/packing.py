"""Run the kernels that encode a batch of chunks on the processor, compiled by g++."""

import ctypes

import numpy as np

from oocgemm.kernels.launches import DeviceStrip, batches
from oocgemm.planning.cost.coding import Division, frames_bytes
from oocgemm.stores.codecs import index_of
from tests.support.decoding import Array
from tests.support.native import built

GUARD = 4096
BLOCKS = 3


def packed(x: Array, chunk: tuple[int, int], codec: str) -> dict[tuple[int, int], bytes]:
    """Encode the chunks of a matrix. Return their frames by the numbers of the chunks."""
    item = x.itemsize
    form = Division.of(codec, chunk, item)
    assert form is not None
    strip = DeviceStrip(x.ctypes.data, x.shape, chunk)
    count = strip.chunks
    host = np.full(frames_bytes(form, count) + GUARD, 0xA5, np.uint8)
    batch = max(1, count // 2)  # a batch of fewer chunks comes last
    work = np.full(form.work_bytes(batch) + GUARD, 0xA5, np.uint8)
    for given in batches(form, strip, (work.ctypes.data, work.nbytes - GUARD), host.ctypes.data):
        assert given.count <= batch
        built("pack").pack(ctypes.byref(given), BLOCKS)
    assert (host[-GUARD:] == 0xA5).all()
    assert (work[-GUARD:] == 0xA5).all()
    across = -(-x.shape[1] // chunk[1])
    return {
        divmod(number, across): host[start : start + size].tobytes()
        for number, (start, size) in enumerate(index_of(host, count))
    }
