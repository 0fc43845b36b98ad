"""The ring of pinned buffers copies blocks of pageable memory to and from the device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm.backends.base import Array, Pageable
from oocgemm.errors import ExecutionError
from oocgemm.planning.cost.footprint import RingShape
from oocgemm.planning.tiling import Range
from oocgemm.stores.files import CachedBlock, CachedChunks
from oocgemm.system import pool
from tests.support.backends_here import needs_gpu
from tests.support.fake_cuda import Fault, fake_cuda

SHAPE = 4, 512  # in elements of 8 bytes: as many bytes as the buffers of two threads
DTYPE = np.dtype(np.float64)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=needs_gpu)])
def cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    with fake_cuda() if request.param == "fake" else nullcontext():
        import cupy

        yield cupy.cuda


@pytest.fixture(params=["compiled", "python"])
def ring(cuda: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from oocgemm.backends.cuda.pageable import Ring

    if request.param == "python":
        monkeypatch.setattr(pool, "compiled", lambda: None)
    elif not pool.available():
        pytest.skip("there is no compiled host code")
    made = Ring(cuda.Device(0), RingShape(3, 1 << 12))
    assert (made._direction("upload").compiled is None) == (request.param == "python")
    yield made
    made.close()


@pytest.fixture
def address(cuda: Any) -> Iterator[int]:
    """Return the address of device memory for eight blocks."""
    found = cuda.runtime.malloc(8 * SHAPE[0] * SHAPE[1] * DTYPE.itemsize)
    yield found
    cuda.runtime.free(found)


def block(x: Array, *, uploads: bool = False, before: Callable[[], object] | None = None) -> Pageable:
    """Return an array as a block. `before` is called before each copy of a piece, by a thread of Python."""

    def move(rows: Range, cols: Range, part: Array) -> None:
        if before is not None:
            before()
        inside = x[slice(*rows), slice(*cols)]
        np.copyto(*((part, inside) if uploads else (inside, part)))

    return Pageable(SHAPE, DTYPE, move, memory=x if before is None else None)


def test_the_device_may_overwrite_a_block_that_the_host_still_writes(ring: Any, address: int) -> None:
    first, second, found, written = np.ones(SHAPE), np.full(SHAPE, 2.0), np.zeros(SHAPE), threading.Event()
    uploaded = ring.upload(address, block(first, uploads=True), [])()
    down = ring.download(address, block(found, before=lambda: written.wait(30)), [uploaded.end])()
    ring.upload(address, block(second, uploads=True), [down.end])().end.synchronize()
    assert not found.any()
    written.set()
    down.finish()
    np.testing.assert_array_equal(found, first)


def test_an_error_of_the_host_is_raised_when_it_is_waited_for(ring: Any, address: int) -> None:
    def fail() -> None:
        raise ValueError("no room")

    uploaded = ring.upload(address, block(np.ones(SHAPE), uploads=True), [])()
    with pytest.raises(ValueError, match="no room"):
        ring.download(address, block(np.ones(SHAPE), before=fail), [uploaded.end])().finish()


@pytest.mark.parametrize("moved", [0, 2])
def test_many_blocks_are_copied_at_a_time(ring: Any, address: int, moved: int) -> None:
    """Every second block is copied by a thread of Python if `moved` is 2."""

    def some(x: Array, i: int, *, uploads: bool = False) -> Pageable:
        return block(x, uploads=uploads, before=(lambda: None) if moved and i % moved else None)

    there, back = np.random.default_rng(1).random((8, *SHAPE)), np.zeros((8, *SHAPE))
    places = [address + i * there[0].nbytes for i in range(8)]
    uploads = [ring.upload(places[i], some(x, i, uploads=True), []) for i, x in enumerate(there)]
    ends = [upload().end for upload in uploads]
    downloads = [ring.download(places[i], some(x, i), ends) for i, x in enumerate(back)]
    for download in downloads:
        download().finish()
    np.testing.assert_array_equal(back, there)


def test_a_block_that_nobody_waits_for_stays_in_memory(ring: Any, cuda: Any, address: int) -> None:
    there = np.random.default_rng(1).random(SHAPE)
    uploaded = ring.upload(address, block(there.copy(), uploads=True), [])().end
    back = np.zeros(SHAPE)
    ring.download(address, block(back), [uploaded])
    ring.download(address, block(again := np.zeros(SHAPE)), [uploaded])().finish()
    np.testing.assert_array_equal(again, there)


@pytest.mark.parametrize("lacking", [False, True])
def test_a_block_of_files_is_uploaded_by_compiled_threads_as_far_as_they_can(
    ring: Any, address: int, tmp_path: Path, lacking: bool
) -> None:
    x, moved = np.random.default_rng(1).random((2 * SHAPE[0], 2 * SHAPE[1])), list[Range]()
    (tmp_path / "x").write_bytes(b"head" + x.tobytes())
    size = x.nbytes + 4 + lacking  # a shorter file is left to Python
    chunks = CachedChunks(tmp_path / "x", None, x.shape, 8, size, offset=4)
    part = x[3 : 3 + SHAPE[0], 5 : 5 + SHAPE[1]]

    def move(rows: Range, cols: Range, out: Array) -> None:
        moved.append(rows)
        out[...] = part[slice(*rows), slice(*cols)]

    given, compiled = Pageable(SHAPE, DTYPE, move, stored=CachedBlock(chunks, 3, 5)), pool.available()
    uploaded, back = ring.upload(address, given, [])(), np.zeros(SHAPE)
    ring.download(address, block(back), [uploaded.end])().finish()
    np.testing.assert_array_equal(back, part)
    assert bool(moved) == (lacking or not compiled)
    assert chunks.incomplete == (lacking and compiled)


def test_a_lane_is_given_back_if_the_device_has_failed() -> None:
    """The compiled thread of the lane waits for it, and closing the ring waits for that thread."""
    if not pool.available():
        pytest.skip("there is no compiled host code")
    with fake_cuda() as device:
        import cupy

        from oocgemm.backends.cuda.pageable import Ring

        ring, go = Ring(cupy.cuda.Device(0), RingShape(3, 1 << 12)), threading.Event()
        address = cupy.cuda.runtime.malloc(2 * SHAPE[0] * SHAPE[1] * DTYPE.itemsize)
        moved = ring.upload(address, block(x := np.ones(SHAPE), uploads=True, before=lambda: go.wait(30)), [])
        copied = ring.upload(address + x.nbytes, block(x, uploads=True), [])
        device.faults["cuMemcpyAsync"] = Fault(late=True)
        go.set()

        def end() -> None:
            for ended in (moved, copied):
                with suppress(cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError):
                    ended().end.synchronize()
            ring.close()

        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


def test_the_device_writes_to_no_memory_of_a_ring_whose_threads_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not pool.available():
        pytest.skip("there is no compiled host code")
    with fake_cuda() as device:
        import cupy

        from oocgemm.backends.cuda import pageable
        from oocgemm.backends.cuda.pageable import Ring

        def refuse(*given: object, **options: object) -> None:
            raise ExecutionError("the system cannot start a thread")

        monkeypatch.setattr(pageable, "Pool", refuse)
        ring = Ring(cupy.cuda.Device(0), RingShape(3, 1 << 12))
        with pytest.raises(ExecutionError, match="cannot start a thread"):
            ring.upload(0, block(np.ones(SHAPE), uploads=True), [])
        device.check()
