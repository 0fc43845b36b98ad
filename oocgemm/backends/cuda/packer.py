"""Compress the chunks of strips of C in zstd, blosc-zstd or blosc-lz4 by the kernels of `kernels/encoding`.

They run on the stream of Downloads, instead of a copy, and write the frames to the pinned host slot of the
strip. So only compressed bytes cross the link, and the host need not know their number before.
"""

from typing import Any

from oocgemm.backends.cuda.launch import Kernels
from oocgemm.backends.encoding import Strip, batches, shuffle_blocks
from oocgemm.kernels.spec import Launch
from oocgemm.planning import Operation, Plan, division_of
from oocgemm.planning.cost.coding import COMPRESSORS
from oocgemm.planning.tiling import length


class Packer:
    """The kernels on one device, and the memory for a batch of chunks."""

    def __init__(self, plan: Plan, kernels: Kernels, work: tuple[int, int]) -> None:
        """Compile and load the kernels. The device must be the current one.

        `work` are the address and the size of the memory on the device.
        """
        division = division_of(plan.setting, plan.tile)
        assert division is not None
        self._division, self._chunk, self._work = division, plan.chunks, work
        compress = "lz4_compress" if division.compressor == COMPRESSORS["blosc-lz4"] else "zstd_compress"
        self._kernels = {
            entry: kernels.plain(entry, entry, ()) for entry in ("shuffle", compress, "locate", "assemble")
        }

    def launch(self, op: Operation, address: int, host: int, stream: Any) -> None:
        """Compress the strip at a device address on a stream, into the host slot at the address `host`."""
        strip = Strip(address, (length(op.m), length(op.n)), self._chunk)
        with stream:
            for given in batches(self._division, strip, self._work, host):
                streams = given.count * given.streams
                for entry, kernel in self._kernels.items():
                    grid = {"shuffle": (shuffle_blocks(given), given.count), "locate": (1, 1)}
                    x, y = grid.get(entry, (streams, 1))
                    kernel(Launch((x, y, 1), (32, 1, 1)), given)
