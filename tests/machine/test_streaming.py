"""Calibration loads matrices as runs do: by the executor, with all I/O threads, and in whole chunks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm import backends, stores
from oocgemm.machine import calibrate, workbench
from oocgemm.machine.calibrate import storage_rates
from oocgemm.machine.workbench import loading_seconds, rate_of
from oocgemm.planning import Chunked, InMemory, Writing, default_model
from oocgemm.stores.zarr_chunks import DirectChunks
from oocgemm.stores.zarr_matrix import ZarrMatrix
from oocgemm.timeline import Span
from tests.support.fake_cuda import fake_cuda
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

ROWS, COLS, DEPTH = 256, 512, 64
A = np.random.default_rng(0).integers(-9, 9, (ROWS, COLS)).astype("float64")
GPU = default_model("cuda", 16)


def span(kind: str, start: int, end: int, operand: str = "A", size: int = 8) -> Span:
    return Span(0, kind, operand, kind, kind, 0, (0, 0), 0, start, end, size, 0)


def test_the_time_of_loading_is_that_in_which_any_panel_is_read() -> None:
    other = span("read", 0, 10**9, "B")
    spans = [
        span("read", 0, 30),
        span("read", 20, 40),
        span("read", 90, 100),
        span("upload", 0, 10**6),
        other,
    ]
    assert loading_seconds(spans) == pytest.approx(50e-9)
    # If nothing is read, since the device copies from the matrix itself, the uploads count.
    direct = [one._replace(bytes=0) if one.kind == "read" else one for one in spans]
    assert loading_seconds(direct) == pytest.approx(1e-3)
    assert loading_seconds([]) == 0
    matrix = stores.open_matrix("A", A)
    assert rate_of(matrix, 2.0) == A.nbytes / 2
    assert rate_of(matrix, 0.0) == float("inf")


@pytest.mark.parametrize("stored", [False, True])
def test_a_gpu_stages_and_uploads_every_panel_each_time(tmp_path: Path, stored: bool) -> None:
    with fake_cuda() as device:
        engine, source = backends.open_backend("cuda"), stores.open_matrix("A", A)
        if stored:
            path, _ = calibrate._written(GPU, str(tmp_path), A, DEPTH, "none", 0.0)
            calibrate._evict(path)
            source = stores.open_matrix("A", str(path))
            source.layout = source.layout.changed(page_cached=False)
        with workbench.streaming(engine, GPU, source, DEPTH) as run:
            for _ in range(2):
                spans = run()
                for kind in ("read", "upload") if stored else ("upload",):
                    moved = [s.bytes for s in spans if (s.kind, s.operand) == (kind, "A")]
                    assert moved == [ROWS * DEPTH * 8] * (COLS // DEPTH), kind
        device.check()


def test_the_host_reads_every_panel_each_time() -> None:
    engine, machine = backends.open_backend("host"), default_model("host", 2)
    with workbench.streaming(engine, machine, stores.open_matrix("A", A), DEPTH) as read:
        for _ in range(2):
            spans = read()
            assert {s.kind for s in spans} == {"read"}
            assert sum(s.bytes for s in spans) == A.nbytes


def test_as_many_threads_read_as_in_a_run() -> None:
    class Stored:
        shape, dtype = (8192, 16384), np.dtype("float64")
        layout = Chunked((2048, 2048), writing=Writing((2048, 2048)))

    matrix: Any = Stored()
    assert workbench._plan(GPU, matrix, 2048).candidate.io_threads == 12
    matrix.layout = replace(matrix.layout, partial_reads=False, decode_bytes=2048 * 2048 * 8)
    assert workbench._plan(GPU, matrix, 2048).candidate.io_threads == GPU.codec_threads == 15
    matrix.layout = InMemory(zero_copy_width=1, pinned=True)
    plan = workbench._plan(GPU, matrix, 2048)
    assert plan.slots.host_a == 0
    assert not plan.is_direct("A")


@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_storage_is_measured_with_the_matrix_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    measured: list[tuple[str, int]] = []
    evicted = False

    def noted(engine: Any, machine: Any, matrix: Any, depth: int) -> Any:
        assert matrix.layout.decode_bytes or matrix.layout.page_cached is not evicted
        measured.append((Path(str(matrix.describe()["path"])).name, depth))
        found = np.zeros(matrix.shape)
        matrix.read((0, ROWS), (0, matrix.shape[1]), found)
        np.testing.assert_array_equal(found, A[:, : matrix.shape[1]])
        return workbench.streaming(engine, machine, matrix, depth)

    def evict(folder: Path) -> None:
        nonlocal evicted
        evicted = True

    def cache(folder: Path) -> None:
        nonlocal evicted
        evicted = False

    monkeypatch.setattr(calibrate, "streaming", noted)
    monkeypatch.setattr(calibrate, "_evict", evict)
    monkeypatch.setattr(calibrate, "_cache", cache)
    monkeypatch.setattr(DirectChunks, "in_page_cache", lambda chunks: not evicted)
    said: list[str] = []
    machine = default_model(backend, 4)
    with fake_cuda():
        engine = backends.open_backend(backend)
        rates, decode = storage_rates(engine, machine, tmp_path, A, DEPTH, 0.001, said.append)
    assert min(rates.read, rates.read_scattered, rates.read_cold, rates.write, decode) > 0
    assert said == [f"writing in {tmp_path}", f"reading in {tmp_path}", "decoding zstd"]
    whole = "none", DEPTH
    assert measured == [whole, whole, ("none", DEPTH // 2), ("zstd", min(DEPTH, COLS // 4))]
    assert list(tmp_path.iterdir()) == []


def test_the_rate_of_writes_includes_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Any] = []
    monkeypatch.setattr(ZarrMatrix, "sync_blocks", lambda _, blocks: flushed.append(blocks))
    calibrate._written(GPU, str(tmp_path), A, DEPTH, "none", 0.0)
    assert flushed
    assert set(map(tuple, flushed)) == {(((0, ROWS), (0, COLS)),)}


def test_files_that_are_read_are_in_the_page_cache(tmp_path: Path) -> None:
    path, _ = calibrate._written(GPU, str(tmp_path), A, DEPTH, "none", 0.0)
    calibrate._evict(path)
    calibrate._cache(path)
    assert stores.open_matrix("A", str(path)).layout.page_cached
