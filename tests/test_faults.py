"""Whatever fails during a run ends it with an error that says what failed, where and why.

Nothing is left behind.
"""

import errno
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarr.storage import MemoryStore, WrapperStore

import oocgemm
from oocgemm import ExecutionError, InputError, OocGemmError, OutOfMemoryError, stores
from oocgemm.backends.base import Stream
from oocgemm.backends.host.backend import HostSession
from oocgemm.cli.output import EXIT_FAILED, EXIT_USAGE
from oocgemm.engine import blocks, transfers
from oocgemm.engine.slots import HostSlots
from oocgemm.engine.staging import Staging
from oocgemm.engine.transfers import RETRY_AFTER
from oocgemm.jobs import budgets as budgets_module
from oocgemm.jobs import output, resume
from oocgemm.jobs.journal import JOURNAL
from oocgemm.planning import Kind, Plan
from oocgemm.stores import files
from oocgemm.stores.zarr import metadata
from oocgemm.system import memory
from oocgemm.timeline import Span
from tests.backends_here import staged
from tests.command import run
from tests.faults import ON_DEVICE, Fault, bytewise, faulty_backend, faulty_stores, nothing_left, small_disk
from tests.suite import slow

M, N, K, CHUNK = 40, 50, 30, 10
_rng = np.random.default_rng(0)
A, B = (_rng.integers(-3, 4, shape).astype(float) for shape in ((M, K), (K, N)))
PRODUCT = A @ B
TILE = "20x20x10"
# How A is stored. oocgemm reads "filtered" chunks with zarr, and all others by itself.
STORES: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zstd": {"compressors": ZstdCodec(checksum=True)},
    "blosc": {"compressors": BloscCodec(cname="lz4")},
    "crc32c": {"compressors": Crc32cCodec()},
    "shards": {
        "chunks": (20, 10),
        "serializer": ShardingCodec(chunk_shape=(10, 10), codecs=[BytesCodec()]),
        "compressors": None,
    },
    "filtered": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")], "compressors": numcodecs.Zstd()},
}
DIRECT = [kind for kind in STORES if kind != "filtered"]


@pytest.fixture(scope="module", autouse=True)
def _zarr_has_its_threads() -> None:
    """Let zarr start its threads before the tests. Their file descriptors do not count as left behind."""
    zarr.ones((1,))[:]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "RETRY_AFTER", (0.01,) * 3)


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def a(tmp_path: Path, kind: str) -> Path:
    """Store A as the parameter `kind` says, and return its path."""
    return store(tmp_path / "A", kind)


def store(place: Path, kind: str, values: Any = A) -> Path:
    options = {"chunks": (CHUNK, CHUNK)} | STORES[kind]
    zarr.create_array(place, shape=values.shape, dtype="f8", **options)[:] = values
    return place


def chunk(a: Path) -> Path:
    """Return the path of a chunk file of A that the second row of tiles uses."""
    return next(place for place in (a / "c" / "2" / "1", a / "c" / "1" / "1", a / "2.1") if place.is_file())


def multiply(folder: Path, a: Any, b: Any = B, **options: Any) -> oocgemm.Result:
    """Multiply A and B into a new array in a folder."""
    return oocgemm.gemm(a, b, folder / "C", **({"backend": "host", "tile": TILE} | options))


def failure(folder: Path, a: Any, b: Any = B, **options: Any) -> str:
    """Multiply, and return the text of the error. Checks that the failed run leaves nothing behind."""
    with nothing_left(folder):
        try:
            multiply(folder, a, b, **options)
        except OocGemmError as error:
            said = str(error)
        else:
            pytest.fail("nothing failed")
    assert_not_whole(folder / "C")
    return said


def assert_not_whole(c: Path) -> None:
    """Check that there is no C, or that it is marked as unfinished and can be resumed."""
    if c.exists():
        assert zarr.open_array(c).attrs["oocgemm"] == {"complete": False}
        assert "with --resume" in resume.resume_hint(c)
        with pytest.raises(InputError, match="A is the result of an unfinished run"):
            oocgemm.matmul(c, np.eye(zarr.open_array(c).shape[1]), backend="host")


def once_planned(act: Callable[[], object]) -> Callable[[Plan], Callable[[object], None]]:
    """Return a `progress` argument that calls `act` between planning and the first read."""

    def progress(plan: Plan) -> Callable[[object], None]:
        act()
        return lambda span: None

    return progress


# Damaged and missing files.


def _cut(place: Path) -> None:
    os.truncate(place, place.stat().st_size // 2)


def _garbage(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 255
    content[:4] = b"\xff" * 4
    place.write_bytes(content)


def _longer(place: Path) -> None:
    place.write_bytes(place.read_bytes() + b"\0" * 8)


def _folder(place: Path) -> None:
    place.unlink()
    place.mkdir()


def _no_end(place: Path) -> None:
    place.unlink()
    place.symlink_to(place)


DAMAGES = (_cut, _garbage, _folder, _no_end)


# Damage that cannot be noticed. Raw chunks have no checksum, and zarr treats a folder in the place of a chunk
# as a missing chunk.
UNSEEN = {("raw", _garbage), ("filtered", _folder)}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in STORES for damage in DAMAGES if (kind, damage) not in UNSEEN],
    indirect=["kind"],
)
@pytest.mark.parametrize("when", [*slow(("before",)), "once planned"])
def test_a_damaged_file_is_named(
    tmp_path: Path, a: Path, kind: str, damage: Callable[[Path], None], when: str
) -> None:
    if (kind, damage) == ("shards", _garbage):
        damage = _garbage_index
    options = {}
    if when == "before":
        damage(chunk(a))
    else:
        options["progress"] = once_planned(lambda: damage(chunk(a)))
    said = failure(tmp_path, a, **options)
    assert "of tile (1, " in said
    assert "A[20:" in said
    assert chunk_name(a) in said
    if (kind, damage) == ("shards", _garbage_index):
        assert (
            "is a shard whose index cannot be read (its checksum (crc32c) does not match its content)" in said
        )


def _garbage_index(place: Path) -> None:
    content = bytearray(place.read_bytes())
    content[-10] ^= 255
    place.write_bytes(content)


def chunk_name(a: Path) -> str:
    if (a / ".zarray").exists():
        return "2.1 in "
    return "c/1/1" if (a / "c" / "1").is_dir() and not (a / "c" / "2").is_dir() else "c/2/1"


@pytest.mark.parametrize("kind", DIRECT, indirect=True)
@pytest.mark.parametrize("part", ["chunk", *slow(("row",), ("all",))])
def test_a_chunk_deleted_during_a_run_is_not_the_fill_value(tmp_path: Path, a: Path, part: str) -> None:
    place = {"chunk": chunk(a), "row": chunk(a).parent, "all": a}[part]

    def vanish() -> None:
        place.unlink() if part == "chunk" else shutil.rmtree(place)

    said = failure(tmp_path, a, progress=once_planned(vanish))
    assert "is missing in" in said
    assert str(a) in said


@pytest.mark.parametrize("kind", DIRECT, indirect=True)
def test_a_chunk_that_has_never_been_there_is_the_fill_value(tmp_path: Path, a: Path) -> None:
    chunk(a).unlink()
    expected = zarr.open_array(a)[:] @ B
    np.testing.assert_array_equal(multiply(tmp_path, a).out[:], expected)


def test_chunks_that_a_run_adds_to_c_are_no_vanished_chunks(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "C", shape=(M, N), dtype="f8", chunks=(CHUNK, CHUNK), compressors=None)
    result = multiply(tmp_path, A, beta=1)
    np.testing.assert_array_equal(result.out[:], PRODUCT)


@pytest.mark.parametrize("again", [False, True], ids=["", "and is made by another run"])
@pytest.mark.parametrize("moment", ["begun", "written", "recorded"])
def test_a_c_that_vanishes_under_a_run_is_not_half_made_again(
    tmp_path: Path, moment: str, again: bool
) -> None:
    a, b = store(tmp_path / "A", "raw"), store(tmp_path / "B", "raw", B)
    c, written = tmp_path / "C", 0

    def vanish() -> None:
        c.rename(tmp_path / "away")
        if again:
            multiply(tmp_path, a, b, compressor="zstd")

    def progress(plan: Plan) -> Callable[[Span], None]:
        if moment == "begun":
            vanish()
            raise OSError(errno.ENOENT, "and the run fails", str(c))
        return see

    def see(span: Span) -> None:
        nonlocal written
        if span.kind == "write":
            written += span.bytes
            if written == PRODUCT.nbytes:
                while moment == "recorded" and (c / ".oocgemm" / JOURNAL).read_bytes().count(b"done") < 6:
                    time.sleep(0.001)
                vanish()

    with nothing_left(tmp_path):
        try:
            multiply(tmp_path, a, b, compressor="zstd", progress=progress)
        except ExecutionError as error:
            said = str(error)
    assert re.search(r"cannot be (made durable|written to the disk): \[Errno 2\]", said)
    assert str(c) in said
    assert c.exists() == again
    if again:
        assert multiply(tmp_path, a, b, resume=True).plan.steps == 0


@pytest.mark.parametrize(("name", "beta"), [("A", 1), ("B", 1), ("C", 1), ("C", 0)])
def test_a_mapped_file_truncated_during_a_run_is_an_error(tmp_path: Path, name: str, beta: int) -> None:
    for place, values in (("A", A), ("B", B), ("C", PRODUCT)):
        np.save(tmp_path / f"{place}.npy", values)
    operands = [tmp_path / f"{place}.npy" for place in "ABC"]

    def cut() -> None:
        os.truncate(tmp_path / f"{name}.npy", 512)

    options: dict[str, Any] = {"beta": beta, "overwrite": True, "backend": "host", "tile": TILE}
    with nothing_left(tmp_path):
        try:
            oocgemm.gemm(*operands, **options, progress=once_planned(cut))
        except ExecutionError as error:
            said = str(error)
    assert f"{'reading' if beta else 'writing'} {name}[0:" in said
    assert "truncated from" in said


# Reads that fail and are tried again.

PASSING: list[Exception] = [
    *(
        OSError(number, os.strerror(number))
        for number in (errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ESTALE)
    ),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    ConnectionRefusedError("refused"),
    TimeoutError("too late"),
    type("ServerDisconnectedError", (Exception,), {})("gone"),
]
LASTING: list[Exception] = [
    *(
        OSError(number, os.strerror(number))
        for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENOMEM)
    ),
    EOFError("ends too early"),
    ValueError("cannot be decoded"),
    RuntimeError("error during blosc decompression: -1"),
    MemoryError("none left"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_failure_that_passes_costs_nothing_but_time(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=4, times=3)
    with nothing_left(tmp_path):
        with faulty_stores(read_A=fault):
            result = multiply(tmp_path, A)
        np.testing.assert_array_equal(result.out[:], PRODUCT)
        assert len(result.timeline.header["retried"]) == 3
        assert all("A[" in where and str(error) in where for where in result.timeline.header["retried"])
        del result


def test_how_often_and_when_it_is_tried_again_is_stated() -> None:
    *first, last = map(str, RETRY_AFTER)
    limits = Path(__file__).parent.parent / "docs" / "limits.md"
    assert len(RETRY_AFTER) == 5
    assert f"tried again five times, after {', '.join(first)} and {last} s" in " ".join(
        limits.read_text().split()
    )


def test_a_persistent_failure_is_retried_as_often_as_stated(tmp_path: Path) -> None:
    fault = Fault(OSError(errno.EIO, "Input/output error"), first=1)
    with faulty_stores(read_B=fault), staged():
        said = failure(tmp_path, A, tile=f"{M}x{N}x{K}")
    assert fault.calls == 1 + len(transfers.RETRY_AFTER)
    assert (
        "read B[0:30, 0:50] of tile (0, 0), step 0: reading B[0:30, 0:50]: OSError: [Errno 5] Input/output"
        in said
    )


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_a_failure_that_lasts_is_not_tried_again(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=2)
    with faulty_stores(read_A=fault):
        said = failure(tmp_path, A, np.eye(K), tile=f"20x{K}x{K}")
    assert fault.calls == 2
    assert "reading A[20:40, 0:30]" in said
    assert str(error) in said


@pytest.mark.parametrize("error", [*PASSING[:1], *LASTING[:1]], ids=repr)
def test_writes_are_not_tried_again(tmp_path: Path, error: Exception) -> None:
    fault = Fault(error, first=2)
    with faulty_stores(write_C=fault), staged():
        said = failure(tmp_path, A, tile=f"20x{N}x{K}", chunks=(20, N))
    assert fault.calls == 2
    assert "tile (1, 0)" in said
    assert "writing C[20:40, 0:50]" in said


@contextmanager
def ended_early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the block ends before a read is tried again, which would take a long time.

    A time limit of the test would not do: a run that is stopping delays whatever interrupts it.
    """
    monkeypatch.setattr(transfers, "RETRY_AFTER", (20.0,) * 3)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < transfers.RETRY_AFTER[0]


def test_a_run_that_stops_waits_for_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Fault(OSError(errno.EIO, "passing"))
    ending = Fault(PermissionError(errno.EACCES, "lasting"), delay=0.1)
    with ended_early(monkeypatch), faulty_stores(read_A=waiting, read_B=ending), staged(2):
        assert "lasting" in failure(tmp_path, A)
    assert 1 <= waiting.calls <= 2  # each thread reads once, and no read is tried again


def test_nothing_new_starts_once_something_has_failed(tmp_path: Path) -> None:
    others = Fault()
    with faulty_stores(read_A=Fault(ValueError("wrong"), delay=0.05), read_B=others), staged():
        assert "wrong" in failure(tmp_path, A)
    assert others.calls == 0


def test_an_interrupt_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Fault(OSError(errno.EIO, "passing"), times=1)
    # A shell may have started the tests with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with ended_early(monkeypatch), nothing_left(tmp_path), faulty_stores(read_A=waiting):
            try:
                multiply(tmp_path, A)
            except KeyboardInterrupt:
                pass
            else:
                pytest.fail("it went on")
    finally:
        signal.signal(signal.SIGINT, before)


class Flaky(WrapperStore[MemoryStore]):
    """A remote store whose connection breaks at every fifth read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.gets = 0

    async def get(self, key: str, *rest: Any, **options: Any) -> Any:
        self.gets += "/" in key
        if self.gets % 5 == 4:
            raise ConnectionResetError("the connection broke")
        return await super().get(key, *rest, **options)


def test_a_connection_that_breaks_is_made_again(tmp_path: Path) -> None:
    flaky = Flaky(MemoryStore())
    a = zarr.create_array(flaky, shape=A.shape, dtype="f8", chunks=(CHUNK, CHUNK))
    a[:] = A
    flaky.gets = 0
    result = multiply(tmp_path, a)
    np.testing.assert_array_equal(result.out[:], PRODUCT)
    assert result.timeline.header["retried"]


def test_a_report_tells_of_reads_that_were_tried_again(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "B.npy", B)
    with faulty_stores(read_A=Fault(TimeoutError("too late"), times=2)):
        done = run(tmp_path / "A.npy", tmp_path / "B.npy", tmp_path / "C")
    assert done.code == 0
    assert "retried 2 failed reads, the last one: reading A[" in done.out
    assert "TimeoutError: too late" in done.out


# Short reads and writes, and slow ones.


@pytest.mark.parametrize("most", [1, 1000])
def test_short_reads_and_writes_give_the_same_product(tmp_path: Path, a: Path, most: int) -> None:
    b = store(tmp_path / "B", "raw", B)
    with bytewise(most):
        result = multiply(tmp_path, a, b)
    np.testing.assert_array_equal(result.out[:], PRODUCT)
    assert multiply(tmp_path, a, b, resume=True).plan.steps == 0  # the journal says that all tiles are done


@pytest.mark.parametrize("most", [1, 700_001, 1 << 20])
def test_short_direct_reads_give_the_same_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("oocgemm.stores.files.resident", lambda address, size: False)
    rows = 512 if most > 1 else 1
    values = np.random.default_rng(0).standard_normal((rows, 512))
    monkeypatch.setattr("oocgemm.stores.files.MIN_DIRECT", 4096)
    a = zarr.create_array(tmp_path / "A", data=values, chunks=(rows, 512), compressors=None)
    with nothing_left(tmp_path), bytewise(most):
        oocgemm.matmul(tmp_path / "A", np.eye(512), out=tmp_path / "C", chunks=(rows, 512), backend="host")
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], a[:])


@pytest.mark.parametrize("late", [False, True])
def test_whatever_is_slow_the_product_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def prefault(self: HostSlots, start: int) -> None:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            self.arena[start : start + self._c_bytes] = 255
            time.sleep(0.001)

    monkeypatch.setattr(HostSlots, "_prefault", prefault)
    zarr.create_array(tmp_path / "C", data=PRODUCT, chunks=(CHUNK, CHUNK))
    slow = {name: Fault(delay=0.004) for name in ("read_A", "read_B", "read_C", "write_C")}
    busy = {name: Fault(delay=0.002) for name in ("upload", "multiply", "download")}
    with nothing_left(tmp_path):
        with faulty_stores(**slow), faulty_backend(late, **busy), staged(2):
            multiply(tmp_path, A, beta=2)
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], 3 * PRODUCT)


# Failing backends.


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("operation", ["upload", "multiply", "download"])
def test_a_device_that_fails_names_the_operation(
    tmp_path: Path, operation: str, first: int, late: bool
) -> None:
    fault = Fault(RuntimeError("cudaErrorLaunchFailure: unspecified launch failure"), first=first)
    with faulty_backend(late, **{operation: fault}), staged():
        said = failure(tmp_path, A)
    # An asynchronous failure may be noticed first by an operation that waited for the failed one.
    assert late or said.startswith(operation)
    assert "of tile (" in said
    assert "cudaErrorLaunchFailure" in said


def test_a_backend_that_cannot_be_opened_leaves_nothing(tmp_path: Path) -> None:
    with faulty_backend(open=Fault(oocgemm.BackendError("no such kernel here"))):
        assert failure(tmp_path, A) == "no such kernel here"


@pytest.mark.parametrize("first", [2, 1000])
def test_a_session_is_closed_however_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    close = Mock()
    monkeypatch.setattr(HostSession, "close", close)
    with faulty_stores(read_A=Fault(ValueError("no"), first=first)), suppress(ExecutionError):
        multiply(tmp_path, A)
    assert close.call_count == 1


def test_memory_is_freed_while_c_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed, right_close, right_seal = threading.Event(), HostSession.close, output.Journaled.seal
    early = []

    def close(self: HostSession) -> None:
        right_close(self)
        freed.set()

    def seal(self: output.Journaled) -> None:
        early.append(freed.wait(30))
        right_seal(self)

    monkeypatch.setattr(HostSession, "close", close)
    monkeypatch.setattr(output.Journaled, "seal", seal)
    multiply(tmp_path, A)
    assert early == [True]


def test_without_a_thread_memory_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ThreadPoolExecutor.submit

    def submit(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        if "oocgemm-free" in str(vars(self)["_thread_name_prefix"]):
            raise RuntimeError("can't start new thread")
        return right(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    multiply(tmp_path, A)


def test_what_fails_to_close_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = HostSession.close

    def close(self: HostSession) -> None:
        right(self)
        raise RuntimeError("lost")

    monkeypatch.setattr(HostSession, "close", close)
    said = ""
    with nothing_left(tmp_path):
        try:
            multiply(tmp_path, A)
        except RuntimeError as error:
            said = str(error)
    assert said == "lost"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, asynchronous: bool
) -> None:
    monkeypatch.setattr(HostSession, "asynchronous", ON_DEVICE if asynchronous else ())

    @contextmanager
    def worker(self: HostSession, stream: Stream) -> Iterator[None]:
        if begun or stream.lane != "compute":
            yield
        if stream.lane == "compute":
            raise RuntimeError("cudaErrorDevicesUnavailable")

    monkeypatch.setattr(HostSession, "worker", worker)
    with staged():
        assert failure(tmp_path, A) == "stream compute: cudaErrorDevicesUnavailable"


def refused() -> OutOfMemoryError:
    return OutOfMemoryError("the device refuses 90 MiB, 40 MiB are free: pass a smaller --device-memory")


def test_memory_taken_by_others_meanwhile_is_not_planned_with(tmp_path: Path) -> None:
    free = [96 << 20, 48 << 20]
    with nothing_left(tmp_path):
        with faulty_backend(False, free, open=Fault(refused(), times=1)):
            result = multiply(tmp_path, A, tile=None)
        assert result.plan.budgets.device == 48 * 3 / 8 * 2**20
        np.testing.assert_array_equal(result.out[:], PRODUCT)
        del result


def test_a_budget_that_the_device_does_not_have_is_refused(tmp_path: Path) -> None:
    fault = Fault(refused())
    with faulty_backend(open=fault):
        said = failure(tmp_path, A, device_memory="96MiB")
    assert said == str(refused())


# Host memory and threads that the system refuses.


@pytest.mark.parametrize("unified", [True, False])
def test_a_plan_for_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    monkeypatch.setattr(budgets_module, "available_memory", lambda: 100 << 20)
    budgets: dict[str, Any] = {"device_memory": "200MiB", "host_memory": "200MiB"}
    a = np.ones((1800, 1800))
    with nullcontext() if unified else staged():
        said = failure(tmp_path, a, a, tile="1800x1800x1800", **budgets)
        assert "100 MiB are available" in said
        assert ("device_memory=" in said) == unified
        named = dict(re.findall(r"(\w+_memory)='(\w+)'", said))
        assert all(f"--{name.replace('_', '-')} {size}" in said for name, size in named.items())
        np.testing.assert_array_equal(oocgemm.matmul(a, a, backend="host", **budgets | named), a @ a)


def test_a_c_that_no_memory_would_hold_wants_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "available_memory", lambda: 60 << 20)
    monkeypatch.setattr(output, "available_memory", lambda: 60 << 20)
    column = np.ones((3000, 1))
    options: dict[str, Any] = {"device_memory": "20MiB", "host_memory": "8MiB", "tile": "300x300x1"}
    with pytest.raises(
        InputError, match=r"C takes 68\.7 MiB, more than the 60 MiB of memory that are available: pass a path"
    ):
        oocgemm.gemm(column, column, trans_b="T", backend="host", **options)


@pytest.mark.parametrize("size", [1 << 55, 1 << 63, 1 << 70])
def test_more_memory_than_can_be_addressed_is_refused(size: int) -> None:
    with pytest.raises(OutOfMemoryError, match=r"the system refuses .* pass a smaller --host-memory"):
        memory.allocate(size)


def test_memory_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    for name in "AB":
        np.save(tmp_path / f"{name}.npy", np.ones((2000, 2000)))
    code = (
        "import resource, sys, numpy, oocgemm.cli.main, oocgemm.stores, oocgemm.backends.host.backend;"
        "import zarr; numpy.ones((64, 64)) @ numpy.ones((64, 64));"
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv.pop(1)) << 20),) * 2); "
        "oocgemm.cli.main.main()"
    )
    for room in (5, 11, 31, 46):
        command = [
            sys.executable,
            "-c",
            code,
            str(room),
            "run",
            "A.npy",
            "B.npy",
            "C.zarr",
            "--backend",
            "host",
        ]
        budgets = ["--device-memory", "80MiB", "--host-memory", "32MiB"]
        done = subprocess.run([*command, *budgets], check=False, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode in (EXIT_FAILED, EXIT_USAGE), (room, done.stderr)
        assert done.stderr.count("\n") == 1, (room, done.stderr)
        assert done.stderr.startswith("Error: ")
        assert not (tmp_path / "C.zarr").exists()


def mapping_files_only(descriptor: int, *rest: Any, **options: Any) -> mmap.mmap:
    """Stand for `mmap.mmap`: map files as usual, but refuse anonymous memory."""
    if descriptor == -1:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return mmap.mmap(descriptor, *rest, **options)


@pytest.mark.parametrize("compressor", ["zstd", "none"])
def test_a_chunk_without_memory_to_decode_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressor: str
) -> None:
    """Memory is refused for a chunk to decode, or for a chunk to encode that extends beyond the edge of C."""
    a = store(tmp_path / "A", "zstd") if compressor == "zstd" else A
    with monkeypatch.context() as patches:
        patches.setattr(files, "_of_thread", threading.local())
        patches.setattr(files, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": mapping_files_only}))
        said = failure(tmp_path, a, tile="16x20x10", chunks=(16, 20), compressor=compressor)
    assert f"{'reading A[' if compressor == 'zstd' else 'writing C['}" in said
    assert "the system refuses 4 KiB of host memory for a chunk: pass a smaller --host-memory" in said
    assert "damaged" not in said


@pytest.mark.parametrize("first", range(1, 9))
def test_a_thread_that_cannot_be_started_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    right, fault = threading.Thread.start, Fault(RuntimeError("can't start new thread"), first=first)

    def start(self: threading.Thread) -> None:
        if self.name.startswith("oocgemm"):
            fault.strike()
        right(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    interval = sys.getswitchinterval()
    with staged(2):
        assert "can't start new thread" in failure(tmp_path, A)
    assert sys.getswitchinterval() == interval


def staging_of(
    threads: int, pin: Callable[[Sequence[Any]], object] = lambda columns: None, /, **faults: Fault
) -> tuple[Staging, Plan]:
    """Return host buffers for A, B and C whose reads and writes have faults, and their plan."""
    with staged(threads):
        plan = oocgemm.plan(A, B, backend="host", tile=TILE)
    with faulty_stores(**faults):
        operands = {name: stores.open_matrix(name, x) for name, x in (("A", A), ("B", B), ("C", PRODUCT))}
    return Staging(plan, operands, pin), plan


def test_slots_are_pinned_by_the_thread_that_faults_them_in() -> None:
    """The threads that issue copies do not pin buffers."""
    locked: dict[str, list[Any]] = {}

    def lock(columns: Sequence[Any]) -> None:
        locked.setdefault(threading.current_thread().name, []).append([part.copy() for part in columns])

    slots, plan = staging_of(3, lock)
    read = next(operation for operation in plan.schedule() if operation.operand == "A")
    slots.transfer(read, slots.columns(read.writes[0].slot, read))
    for operation in plan.schedule():
        if operation.kind is Kind.WRITE:
            slots.await_prefault(operation.reads[0].slot)
    slots.close()
    (m0, m1), (k0, k1) = read.block
    here = threading.current_thread().name
    assert np.array_equal(locked[here][0][0], A[m0:m1, k0:k1])
    assert len(locked[here]) == 1
    (touched,) = (name for name in locked if name != here)
    assert touched.startswith("oocgemm-prefault")
    assert len(locked[touched]) == plan.slots.host_c


@pytest.mark.parametrize("threads", [1, 3])
def test_a_panel_that_cannot_be_read_is_left_alone_from_then_on(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """After the error no thread writes to the panel's buffer any more, since it may be used again."""
    monkeypatch.setattr(blocks, "MIN_PIECE_BYTES", 160)
    monkeypatch.setattr(blocks, "MAX_PIECE_BYTES", 160)
    fault = Fault(ValueError("wrong"), times=1, delay=0.01)
    slots, plan = staging_of(threads, read_A=fault)
    operation = next(operation for operation in plan.schedule() if operation.operand == "A")
    columns = slots.columns(operation.writes[0].slot, operation)
    with pytest.raises(ExecutionError, match="wrong"):
        slots.transfer(operation, columns)
    calls = fault.calls
    time.sleep(0.05)
    assert fault.calls == calls < len(columns[0]) // 2
    slots.close()


def test_an_error_that_is_kept_keeps_no_slots(tmp_path: Path) -> None:
    kept = []
    with nothing_left(tmp_path), faulty_stores(read_A=Fault(ValueError("wrong"), first=3)):
        try:
            multiply(tmp_path, A)
        except ExecutionError as error:
            kept.append(error)
    assert kept[0].__traceback__ is not None
    placed = kept[0].__cause__
    assert placed is not None
    assert repr(placed.__cause__) == "ValueError('wrong')"


# A disk for C that is full or fails.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    try:
        with small_disk(tmp_path / "disk", 400 << 10) as turn_read_only:
            yield tmp_path / "disk", turn_read_only
    except PermissionError as error:
        pytest.skip(str(error))


LARGE = np.arange(256.0 * 16).reshape(256, 16) % 7  # its product with its transpose takes 512 KiB
NOISE = np.random.default_rng(0).standard_normal((256, 16))
CS: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zstd": {},
    "shards": {"shards": (64, 64)},
    "v2": {"zarr_format": 2, "filters": [numcodecs.Delta("f8")]},
}


def test_a_disk_that_is_full_ends_the_run(disk: tuple[Path, Any]) -> None:
    said = failure(disk[0], NOISE, NOISE, trans_b="T", tile="64x64x16", chunks=(32, 32), compressor="zstd")
    assert "writing C[" in said
    assert "No space left on device" in said


@pytest.mark.parametrize("name", ["C", "C.npy"])
def test_a_disk_without_room_for_c_is_refused(disk: tuple[Path, Any], name: str) -> None:
    with pytest.raises(
        InputError, match=r"takes 512 KiB more, and its disk has 3\d\d KiB free: make room for 1\d\d KiB"
    ):
        oocgemm.gemm(NOISE, NOISE, disk[0] / name, trans_b="T", backend="host")
    assert list(disk[0].iterdir()) == []


@pytest.mark.parametrize("kind", CS)
def test_a_disk_that_is_full_ends_a_run_over_a_c_that_is_there(disk: tuple[Path, Any], kind: str) -> None:
    c = disk[0] / "C"
    zarr.create_array(c, shape=(256, 256), dtype="f8", **({"chunks": (32, 32)} | CS[kind]))
    said = ""
    with nothing_left(disk[0]):
        try:
            oocgemm.gemm(NOISE, NOISE, c, trans_b="T", tile="64x64x16", backend="host", overwrite=True)
        except OocGemmError as error:
            said = str(error)
    if kind == "raw":
        assert re.search(r"takes 512 KiB more, and its disk has 3\d\d KiB free: make room for", said), said
    else:
        assert "writing C[" in said
        assert re.search(
            rf"No space left on device: C at {c} needs about .* more, .* are free\. Make room", said
        )


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_is_full_has_no_room_for_a_mapped_file(disk: tuple[Path, Any], there: bool) -> None:
    c = disk[0] / "C.npy"
    if there:  # C exists, and none of its blocks are allocated
        np.lib.format.open_memmap(c, mode="w+", dtype="f8", shape=(256, 256)).flush()
    before = sorted(disk[0].iterdir())
    with nothing_left(disk[0]), pytest.raises(InputError, match=r"No space left on device|make room for"):
        oocgemm.gemm(NOISE, NOISE, c, trans_b="T", backend="host", overwrite=there)
    assert sorted(disk[0].iterdir()) == before


def test_a_c_that_cannot_be_created_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(metadata, "publish", Mock(side_effect=full))
    assert "C: cannot create a zarr array at" in failure(tmp_path, A)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_read_only_is_refused(disk: tuple[Path, Callable[[], None]]) -> None:
    folder, turn_read_only = disk
    multiply(folder, A)
    np.save(folder / "C.npy", PRODUCT)
    turn_read_only()
    for name in ("new", "new.npy", "C", "C.npy"):
        with nothing_left(folder), pytest.raises(InputError, match=r"[Rr]ead-only"):
            oocgemm.gemm(A, B, folder / name, backend="host", overwrite=True)


@pytest.mark.parametrize("first", range(1, 40, 3))
def test_a_run_whose_disk_turns_read_only_can_be_resumed(tmp_path: Path, first: int) -> None:
    """The disk stays read-only while the failed run cleans up, so that nothing can be deleted."""
    a, b, c = store(tmp_path / "A", "raw"), store(tmp_path / "B", "raw", B), tmp_path / "C"
    fault = Fault(OSError(errno.EROFS, os.strerror(errno.EROFS)), first=first)

    def refusing(right: Callable[..., Any]) -> Callable[..., Any]:
        def act(target: Any, *rest: Any, **options: Any) -> Any:
            within = options.get("dir_fd", target)
            path = os.readlink(f"/proc/self/fd/{within}") if isinstance(within, int) else os.fspath(within)
            if path.startswith(str(c)):
                fault.strike()
            return right(target, *rest, **options)

        return act

    calls = ("pwritev", "write", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "fdatasync")
    with ExitStack() as patches, nothing_left(tmp_path):
        for name in calls:
            patches.enter_context(patch.object(os, name, refusing(getattr(os, name))))
        try:
            multiply(tmp_path, a, b)
        except OocGemmError as error:
            assert os.strerror(errno.EROFS) in str(error)
        else:
            assert fault.calls < first
    np.testing.assert_array_equal(multiply(tmp_path, a, b, resume=True).out[:], PRODUCT)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "replace", "fsync", "open"])
def test_a_disk_that_fails_at_any_call_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    right, c = getattr(os, call), str(tmp_path / "C")
    fault = Fault(OSError(number, os.strerror(number)), first=1 if call == "fsync" else 3)

    def failing(target: Any, *rest: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        if path.startswith(c) and (call != "open" or rest[0] & os.O_WRONLY):
            fault.strike()
        return right(target, *rest, **options)

    monkeypatch.setattr(os, call, failing)
    said = failure(tmp_path, A)
    assert "to the disk: " in said or "writing C[" in said
    assert os.strerror(number) in said


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError("none left")], ids=repr
)
def test_a_tile_that_cannot_be_brought_to_the_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    right, fault = os.fsync, Fault(error)

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("C/c/1/1"):
            fault.strike()
        right(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    assert f"tile (1, 1) of C cannot be made durable: {error}" in failure(tmp_path, A, chunks=(20, 20))


def test_a_map_that_cannot_be_brought_to_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = np.lib.format.open_memmap(tmp_path / "C.npy", mode="w+", dtype="f8", shape=(M, N))
    failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(np.memmap, "flush", failing)
    with pytest.raises(ExecutionError, match="C cannot be written to the disk"):
        oocgemm.gemm(A, B, c, backend="host", tile=TILE)


def test_a_c_without_a_journal_says_whether_it_is_whole() -> None:
    c = zarr.create_array(MemoryStore(), shape=(M, N), dtype="f8", chunks=(CHUNK, CHUNK))
    options: dict[str, Any] = {"backend": "host", "tile": TILE}
    marks: list[dict[str, Any]] = []

    def fails(**faults: Fault) -> dict[str, Any]:
        with faulty_stores(**faults), pytest.raises(ExecutionError):
            oocgemm.gemm(A, B, c, **options)
        return dict(c.attrs)

    unfinished = {"oocgemm": {"complete": False}}
    assert fails(read_A=Fault(ValueError("before anything is written"))) == {}
    assert fails(write_C=Fault(ValueError("once something is"), first=3)) == unfinished
    assert fails(read_A=Fault(ValueError("again"))) == unfinished
    oocgemm.gemm(A, B, c, **options, progress=once_planned(lambda: marks.append(dict(c.attrs))))
    assert (marks, dict(c.attrs)) == ([unfinished], {})


def test_a_c_without_a_sidecar_is_unfinished_until_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "sidecar", lambda c: None)
    with faulty_stores(read_A=Fault(ValueError("no"))), pytest.raises(ExecutionError):
        multiply(tmp_path, A)
    assert zarr.open_array(tmp_path / "C").attrs["oocgemm"] == {"complete": False}


def test_a_timeline_that_finds_the_disk_full_says_so(disk: tuple[Path, Any]) -> None:
    (disk[0] / "filler").write_bytes(b"\0" * (399 << 10))
    with (
        nothing_left(disk[0]),
        pytest.raises(ExecutionError, match="C is done, but its timeline cannot be written"),
    ):
        oocgemm.gemm(A, B, backend="host", tile="4x4x4", timeline=disk[0] / "log")


# Runs that are resumed after failures.


@contextmanager
def faulty_call(name: str, fault: Fault) -> Iterator[None]:
    right = getattr(os, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        fault.strike()
        return right(*arguments, **options)

    with patch.object(os, name, failing):
        yield


STRIKES: dict[str, Callable[[Fault], Any]] = {
    "reading A": lambda fault: faulty_stores(read_A=fault),
    "reading C": lambda fault: faulty_stores(read_C=fault),
    "writing C": lambda fault: faulty_stores(write_C=fault),
    "a launch": lambda fault: faulty_backend(multiply=fault),
    "a launch, later": lambda fault: faulty_backend(True, multiply=fault),
    "a sync": lambda fault: faulty_call("fsync", fault),
    "a name": lambda fault: faulty_call("replace", fault),
}


@pytest.mark.parametrize("name", ["raw", *slow(("shards",), ("C.npy",))])
@pytest.mark.parametrize("beta", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("strikes", STRIKES)
def test_a_run_that_has_failed_can_be_gone_on_with(
    tmp_path: Path, strikes: str, beta: int, name: str
) -> None:
    a, b = store(tmp_path / "A", "raw"), store(tmp_path / "B", "zstd", B)
    c = tmp_path / "C"
    if name == "C.npy":
        c = tmp_path / name
        np.save(c, PRODUCT)
    else:
        store(c, name, PRODUCT)
    options: dict[str, Any] = {"beta": beta, "backend": "host", "tile": TILE, "overwrite": True}
    failed = 0
    for first in (1, 4, 3, 9, 20):  # each run finishes a few tiles before it fails
        with nothing_left(tmp_path), STRIKES[strikes](Fault(OSError(errno.EDQUOT, "no more"), first=first)):
            try:
                oocgemm.gemm(a, b, c, resume=failed > 0, **options)
            except OocGemmError as error:
                assert "no more" in str(error)
                failed += 1
            else:
                break
    assert failed or (strikes, beta) == ("reading C", 0)
    oocgemm.gemm(a, b, c, resume=True, **options)
    found = np.load(c) if name == "C.npy" else zarr.open_array(c)[:]
    np.testing.assert_array_equal(found, PRODUCT * (1 + beta))


# The command, run as a process.


def test_the_command_ends_in_one_line(tmp_path: Path) -> None:
    a, b = store(tmp_path / "A", "zstd"), store(tmp_path / "B", "raw", B)
    _garbage(chunk(a))
    command = [
        sys.executable,
        "-m",
        "oocgemm",
        "run",
        a,
        b,
        tmp_path / "C",
        "--backend",
        "host",
        "--tile",
        TILE,
    ]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (EXIT_FAILED, "", 1), done.stderr
    assert "A[20:" in done.stderr
    assert "chunk c/2/1" in done.stderr
    assert_not_whole(tmp_path / "C")
