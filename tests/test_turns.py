"""Where the cores that copy multiply too, they do one of these at a time; what a disk is waited for goes on beside."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

import oocgemm
from oocgemm.backends import blas
from oocgemm.backends.host import HostSession
from oocgemm.plan import Kind
from oocgemm.staging import Staging
from oocgemm.stores import files
from oocgemm.stores.arrays import ArrayMatrix
from oocgemm.stores.zarr_store import ZarrMatrix
from oocgemm.threads import Turns

A = np.arange(800.0 * 800).reshape(800, 800) % 7
B = np.arange(800.0 * 800).reshape(800, 800) % 5
PATIENCE = 20  # seconds


def test_copies_run_side_by_side_but_never_beside_a_multiplication() -> None:
    turns, at_once, seen = Turns(), {"copies": 0, "products": 0}, set()
    counting = threading.Lock()

    def go(what: str, turn: Any) -> None:
        for _ in range(60):
            with turn():
                with counting:
                    at_once[what] += 1
                    seen.add(tuple(at_once.values()))
                time.sleep(1e-4)
                with counting:
                    at_once[what] -= 1

    threads = [threading.Thread(target=go, args=("copies", turns.copying)) for _ in range(3)]
    threads += [threading.Thread(target=go, args=("products", turns.multiplying)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(0 in pair for pair in seen)
    assert {(1, 0), (0, 1)} < seen
    assert any(copies > 1 for copies, _ in seen)


def test_a_copy_that_has_asked_goes_before_the_next_multiplication() -> None:
    turns, order = Turns(), list[str]()

    def go(name: str, turn: Any) -> None:
        with turn():
            order.append(name)

    with turns.multiplying():
        copy = threading.Thread(target=go, args=("copy", turns.copying))
        copy.start()
        while not turns._asking:
            time.sleep(1e-3)
        product = threading.Thread(target=go, args=("product", turns.multiplying))
        product.start()
        time.sleep(0.02)
        assert order == []
    for thread in (copy, product):
        thread.join(PATIENCE)
    assert order == ["copy", "product"]


def test_a_copy_that_fails_ends_its_turn() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="no"), turns.copying():
        raise ValueError("no")
    with turns.multiplying():
        pass


def _operands(folder: Path, kind: str) -> tuple[Any, Any]:
    if kind == "memory":
        return A, B
    compressors = ZstdCodec() if kind == "zstd" else None
    for name, values in (("A", A), ("B", B)):
        zarr.create_array(folder / name, data=values, chunks=(400, 400), compressors=compressors)
    return folder / "A", folder / "B"


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", ["memory", "raw", "zstd"])
def test_on_the_host_what_need_only_be_copied_or_decoded_is_not_beside_a_multiplication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verify: bool
) -> None:
    monkeypatch.setattr(
        files, "LEAST_DIRECT", 1 << 12
    )  # of less the page cache is not asked whether it has it
    store = ArrayMatrix if kind == "memory" else ZarrMatrix
    read, gemm = store.read, blas.gemm
    products, beside = [0, 0], list[bool]()

    def reading(matrix: Any, *block: Any) -> None:
        before = products[:]
        read(matrix, *block)
        beside.append(before[0] != before[1] or products != before)

    def multiplying(*arguments: Any) -> None:
        products[0] += 1
        gemm(*arguments)
        products[1] += 1

    monkeypatch.setattr(store, "read", reading)
    monkeypatch.setattr("oocgemm.backends.host.gemm", multiplying)
    a, b = _operands(tmp_path, kind)
    oocgemm.matmul(a, b, out=tmp_path / "C", backend="host", tile="200x200x100", verify=verify)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "C")[:], A @ B)
    assert products == [16 * 8] * 2
    assert beside
    assert not any(beside)


def test_waiting_for_a_turn_is_not_counted_as_reading() -> None:
    turns, begun, took = Turns(), list[int](), list[int]()
    plan = oocgemm.plan(A, B, backend="host")
    read = next(operation for operation in plan.schedule() if operation.kind is Kind.READ)
    staging = Staging(plan, {"A": ArrayMatrix("A", A), "B": ArrayMatrix("B", B)}, turns=turns)

    def go() -> None:
        begun.append(time.perf_counter_ns())
        with staging.turn(read, [np.empty((800, 800))]) as start:
            took.append(start)

    reader = threading.Thread(target=go)
    with turns.multiplying():
        reader.start()
        while not turns._asking:
            time.sleep(1e-3)
        asked = time.perf_counter_ns()
        time.sleep(0.05)
        waited = time.perf_counter_ns() - asked
    reader.join(PATIENCE)
    staging.close()
    assert took[0] - begun[0] >= waited


def test_on_the_host_what_a_disk_is_waited_for_takes_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks that the page cache does not hold."""
    monkeypatch.setattr(files, "resident", lambda _: False)
    monkeypatch.setattr(files, "LEAST_DIRECT", 1 << 16)
    taken = list[object]()
    copying = Turns.copying

    def noted(turns: Turns) -> Any:
        taken.append(turns)
        return copying(turns)

    monkeypatch.setattr(Turns, "copying", noted)
    a, b = _operands(tmp_path, "raw")
    result = oocgemm.matmul(a, b, backend="host", tile="400x400x400")
    np.testing.assert_array_equal(result.out, A @ B)
    assert taken == []
    oocgemm.matmul(A, b, backend="host", tile="400x400x400")
    assert taken


def test_on_the_host_a_core_that_the_blas_leaves_alone_copies_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 1 <= (blas.threads() or 1) <= 1024
    for count, cores, taken in ((1, 2, False), (2, 2, True), (4, 2, True), (None, 2, True)):
        monkeypatch.setattr("oocgemm.backends.host.threads", lambda count=count: count)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        plan = oocgemm.plan(A, B, backend="host")
        assert (HostSession(plan).turns is not None) == taken


def test_what_fails_while_it_is_waited_for_is_tried_again_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, failing = ArrayMatrix.fetch, [ConnectionError("gone"), ConnectionError("still gone")]

    def faulty(matrix: ArrayMatrix, *block: Any) -> bool:
        if failing:
            raise failing.pop(0)
        return fetch(matrix, *block)

    monkeypatch.setattr(ArrayMatrix, "fetch", faulty)
    monkeypatch.setattr("oocgemm.staging.RETRY_AFTER", (0.0, 0.0))
    result = oocgemm.matmul(A, B, backend="host")
    np.testing.assert_array_equal(result.out, A @ B)
    failing += [ConnectionError("gone")] * 9
    with pytest.raises(oocgemm.OocGemmError, match=r"reading [AB]\[.*: ConnectionError: gone"):
        oocgemm.matmul(A, B, backend="host")
