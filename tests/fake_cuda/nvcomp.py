"""A fake of nvCOMP, which decodes with numcodecs."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
from numcodecs import LZ4, Zstd

from tests.fake_cuda.device import Device
from tests.fake_cuda.libraries import Library
from tests.fake_cuda.memory import Array, Block
from tests.fake_cuda.objects import Objects

CANNOT_DECOMPRESS = 12


class Nvcomp(Library):
    """Stands for libnvcomp.so. Its zstd decoder takes a byte of temporary memory per stream."""

    def _nvcompBatchedZstdDecompressGetTempSize(self, *given: Any) -> None:  # noqa: N802
        count, _, _, to, _, _ = given
        ctypes.c_size_t.from_address(to).value = count

    def _nvcompBatchedLZ4DecompressGetTempSize(self, *given: Any) -> None:  # noqa: N802
        ctypes.c_size_t.from_address(given[3]).value = 0

    def _nvcompBatchedZstdDecompressAsync(self, *given: Any) -> None:  # noqa: N802
        assert given[6] >= given[4]
        self._decode(lambda stored, length: Zstd().decode(stored), *given)

    def _nvcompBatchedLZ4DecompressAsync(self, *given: Any) -> None:  # noqa: N802
        self._decode(lambda stored, length: LZ4().decode(length.to_bytes(4, "little") + stored), *given)

    def _decode(self, decode: Any, *given: Any) -> None:
        sources, sizes, lengths, found, count, temporary, room, targets, _, statuses, stream = given
        memory = self._device.memory

        def numbers(address: int) -> Array:
            found: Array = memory.matrix(address, np.int64, 1, count, count)[0]
            return found

        def run() -> None:
            for i in range(count):
                stored = memory.bytes_of(Block(int(numbers(sources)[i]), int(numbers(sizes)[i]))).tobytes()
                length = int(numbers(lengths)[i])
                try:
                    content = np.frombuffer(decode(stored, length), np.uint8)[:length]
                    memory.bytes_of(Block(int(numbers(targets)[i]), content.size))[...] = content
                    numbers(found)[i], status = content.size, 0
                except RuntimeError:
                    status = CANNOT_DECOMPRESS
                memory.matrix(statuses, np.int32, 1, count, count)[0, i] = status

        read = [Block(at, 8 * count) for at in (sources, sizes, lengths, targets)]
        written = [Block(found, 8 * count), Block(statuses, 4 * count), Block(temporary, room)]
        self._device.work(stream, "nvcomp", run, read, written)


@contextmanager
def fake_nvcomp(device: Device) -> Iterator[None]:
    """Install the fake for the block, in which `device` is the fake device."""
    module = ModuleType("nvidia.libnvcomp")
    module.__spec__ = ModuleSpec("nvidia.libnvcomp", None)
    vars(module)["load_library"] = lambda: Nvcomp(device, Objects(device))
    parent = sys.modules.get("nvidia") or ModuleType("nvidia")
    with patch.dict(sys.modules, {"nvidia": parent, "nvidia.libnvcomp": module}):
        yield
