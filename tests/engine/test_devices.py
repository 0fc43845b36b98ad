"""Runs on several devices: equal bits, shared reads, budgets, errors that name the device, resumed runs."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import ExecutionError, InputError, OutOfMemoryError
from oocgemm.backends.base import slot_offsets
from oocgemm.cli.process import EXIT_USAGE
from oocgemm.planning import Kind, Plan, Tier, TileShape
from oocgemm.planning.cost.footprint import HOST_ALIGNMENT
from oocgemm.planning.search import shared_plans
from oocgemm.stores import arrays
from tests.support.backends_here import needs_gpu, running_on
from tests.support.command import command, run
from tests.support.fake_cuda import PACKAGE, Device, Fault, MisuseError, fake_cuda
from tests.support.faulty_runs import store
from tests.support.problems import Array, integers
from tests.support.suite import each_value, slow
from tests.support.summing import summed  # noqa: F401  imports what the kernels of checksums need

UNAVAILABLE = 46  # cudaErrorDevicesUnavailable
UNCORRECTABLE = 214  # cudaErrorECCUncorrectable
FELL_OFF_THE_BUS = 100  # cudaErrorNoDevice
SHAPES = (130, 90), (90, 110)
TILE = "20x20x10"
RNG = np.random.default_rng(2)
A, B = (RNG.standard_normal(shape) for shape in SHAPES)
SEVERAL = ["0,0", "0,1", *slow(("2,0,1",), ("all",))]


@pytest.fixture
def gpus() -> Iterator[Device]:
    """Three fake GPUs."""
    with fake_cuda(devices=3) as found:
        yield found
        found.check()


def product(folder: Path, c: str = "C", kind: str = "raw", **options: Any) -> oocgemm.Result:
    """Multiply two stored arrays on fake GPUs; all other options are as in most tests of this file.

    Panels of "raw" arrays have no host slots, those of "zstd" arrays have.
    """
    operands: list[Any] = []
    for name, values in (("A", A), ("B", B)):
        place = folder / name
        operands.append(place if place.exists() else store(place, kind, values))
    given = {"backend": "cuda", "kernel": "cublas", "tile": TILE, "host_memory": "64MiB"}
    return oocgemm.gemm(
        operands[0], operands[1], folder / c, **(given | {"device_memory": "100MiB"} | options)
    )


def reads(result: oocgemm.Result) -> int:
    """Return the bytes that the host has read: into host slots, or to upload them to one of the devices."""
    spans = result.timeline.spans
    slots = sum(span.bytes for span in spans if span.kind == "read")
    return slots or sum(span.bytes for span in spans if span.kind == "upload" and span.stream != "peer")


@each_value
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("dtype", ["float64", "float16", "complex64", "int8"])
@pytest.mark.parametrize(
    "engine", ["host", "host-staged", "fake-cuda", pytest.param("cuda", marks=needs_gpu)]
)
def test_c_is_exact_on_several_sessions(engine: str, dtype: str, beta: int, tmp_path: Path) -> None:
    a, b = (integers(RNG, shape, dtype) for shape in SHAPES)
    c_dtype = "int32" if dtype == "int8" else dtype
    c = integers(RNG, (130, 110), c_dtype)
    wide = {"int8": "int64", "complex64": "complex128"}.get(dtype, "float64")
    right: Array = (a.astype(wide) @ b.astype(wide) + beta * c.astype(wide)).astype(c_dtype)
    for name, x in (("a", a), ("b", b)):
        np.save(tmp_path / name, x)
    with running_on(engine) as options:
        operands: Any
        for operands in ((a, b), (tmp_path / "a.npy", tmp_path / "b.npy")):
            for verify in (False, True):
                out = c.copy()
                result = oocgemm.gemm(
                    operands[0],
                    operands[1],
                    out,
                    beta=beta,
                    devices=[0, 0, 0],
                    tile=TILE,
                    verify=verify,
                    **options,
                )
                np.testing.assert_array_equal(out, right)
                assert {span.device for span in result.timeline.spans} == {0, 1, 2}


@each_value
@pytest.mark.parametrize("devices", SEVERAL)
@pytest.mark.parametrize("seed", range(3))
def test_c_has_the_bits_of_one_device(devices: Any, seed: int, tmp_path: Path) -> None:
    with fake_cuda(seed, devices=3) as gpus:
        one = np.asarray(product(tmp_path, "one"))
        several = product(tmp_path, devices=devices)
        np.testing.assert_array_equal(np.asarray(several), one)
        gpus.check()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_emulated_products_run_on_several_sessions(dtype: str) -> None:
    a, b = A.astype(dtype), B.astype(dtype)
    given: dict[str, Any] = {"backend": "host", "compute": "emulated", "tile": "64x64x32"}
    one = np.asarray(oocgemm.gemm(a, b, **given))
    np.testing.assert_array_equal(np.asarray(oocgemm.gemm(a, b, devices="0,0", **given)), one)


@each_value
@pytest.mark.parametrize("devices", SEVERAL)
@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_devices_read_each_panel_once_between_them(
    kind: str, devices: Any, gpus: Device, tmp_path: Path
) -> None:
    tile = "11x37x10"  # 12 rows of tiles: in all rounds, two or three devices have rows of one direction
    one = reads(product(tmp_path, "one", kind=kind, tile=tile))
    several = product(tmp_path, devices=devices, kind=kind, tile=tile)
    traffic = several.plan.traffic
    assert A.nbytes + B.nbytes <= reads(several) <= 1.05 * one
    assert traffic["h2d"] > reads(several)
    assert traffic["read"] == (0 if kind == "raw" else reads(several))


def test_panels_are_copied_between_devices_that_cannot_access_each_other(
    gpus: Device, tmp_path: Path
) -> None:
    one = np.asarray(product(tmp_path, "one"))
    oocgemm.backends.open_backend("cuda")
    with patch.object(sys.modules["cupy.cuda"].runtime, "deviceCanAccessPeer", lambda *_: 0):
        several = product(tmp_path, devices="0,1")
    assert not gpus.peers
    product(tmp_path, "connected", devices="0,2")
    assert gpus.peers == {(0, 2), (2, 0)}
    assert any(span.stream == "peer" for span in several.timeline.spans)
    np.testing.assert_array_equal(np.asarray(several), one)


@pytest.mark.parametrize("seed", range(3))
def test_devices_with_one_tile_each_pass_panels_on(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_plans, "_shapes", lambda setting: [TileShape(65, 110, 10)])
    with fake_cuda(seed, devices=3) as gpus:
        result = product(tmp_path, devices="0,1", tile=None)
        assert (result.plan.grid.shape, result.plan.candidate.traversal.alternates) == ((2, 1), False)
        assert reads(result) == A.nbytes + B.nbytes
        np.testing.assert_allclose(np.asarray(result), A @ B, rtol=1e-12, atol=1e-12)
        gpus.check()


@each_value
@pytest.mark.parametrize("tile", ["20x20x10", "40x40x40"])
@pytest.mark.parametrize("seed", range(2))
def test_panels_of_pinned_arrays_are_uploaded_to_one_device(
    seed: int, tile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MIN_ROW_BYTES", 64)
    a, b, c = (integers(RNG, (160, 160), "float64") for _ in range(3))
    with fake_cuda(seed, devices=3) as gpus:
        for x in (a, b, c):
            gpus.memory.pin(x.ctypes.data, x.nbytes, None)
        given: dict[str, Any] = {"backend": "cuda", "kernel": "cublas", "tile": tile}
        result = oocgemm.gemm(a, b, c, devices="0,1,2", device_memory="100MiB", host_memory="64MiB", **given)
        for x in (a, b, c):
            gpus.memory.unpin(x.ctypes.data)
        gpus.check()
    assert set(map(result.plan.is_direct, "ABC")) == {True}
    assert reads(result) < result.plan.traffic["h2d"]
    np.testing.assert_array_equal(c, a @ b)


def test_the_log_describes_every_device(gpus: Device, tmp_path: Path) -> None:
    result = product(tmp_path, devices="2,0", timeline=tmp_path / "log.jsonl")
    described = result.log.header["devices"]
    assert [each["number"] for each in described] == ["2", "0"]
    assert {each["device"] for each in described} == {"a fake GPU"}
    busy = Counter(span.device for span in result.timeline.spans if span.kind == "multiply")
    assert set(busy) == {0, 1}
    assert max(busy.values()) <= 1.2 * min(busy.values())
    assert oocgemm.timeline.read_log(tmp_path / "log.jsonl").spans == result.timeline.spans


@each_value
@pytest.mark.parametrize("devices", ["0,0", "0,1,2"])
@pytest.mark.parametrize("verify", [False, True])
def test_memory_stays_within_the_plan(devices: str, verify: bool, gpus: Device, tmp_path: Path) -> None:
    taken = Counter[int]()

    def watch(plan: Plan) -> Any:
        def observe(span: Any) -> None:
            for each in range(3):
                taken[each] = max(taken[each], gpus.memory.capacity - gpus.memory.free_bytes(each))

        return observe

    result = product(tmp_path, devices=devices, verify=verify, progress=watch)
    plan, numbers = result.plan, devices.split(",")
    for number in range(3):
        sessions = numbers.count(str(number))
        assert (taken[number] > 0) == (sessions > 0)
        assert taken[number] <= sessions * plan.footprint.device_total
    assert result.log.header["held"]["device"] <= plan.footprint.device_total
    assert result.log.header["held"]["host"] <= plan.footprint.host_total
    offsets, size = slot_offsets(plan, "host", HOST_ALIGNMENT)
    strips = [slot for slot in offsets if slot.operand == "C"]
    assert len(strips) == len(numbers) * plan.slots.count(Tier.HOST, "C")
    assert size <= sum(plan.footprint.host[operand] for operand in "ABC") + plan.footprint.host["checks"]


def test_host_slots_are_pinned_for_all_devices(gpus: Device, tmp_path: Path) -> None:
    oocgemm.backends.open_backend("cuda")
    memory = sys.modules[f"{PACKAGE}.host_memory"]
    with (
        patch.object(memory, "PORTABLE", 0),
        pytest.raises(ExecutionError, match=r"device 1: .* accesses .* of another"),
    ):
        product(tmp_path, devices="0,1", kind="zstd")
    with pytest.raises(MisuseError, match="of another"):
        gpus.check()
    gpus.misuses.clear()


@each_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cublasGemmEx", UNAVAILABLE),
        ("cuMemcpyAsync", UNAVAILABLE),
        *slow(("cublasGemmEx", UNCORRECTABLE), ("cuMemcpyAsync", FELL_OFF_THE_BUS)),
    ],
)
def test_a_device_that_fails_is_named_and_the_others_finish_the_product(
    call: str, code: int, late: bool, gpus: Device, tmp_path: Path
) -> None:
    right = np.asarray(product(tmp_path, "right"))
    gpus.faults[call] = Fault(code, first=gpus.count(call) + 60, late=late, device=1)
    with pytest.raises(ExecutionError, match=rf"device 1: CUDA error {code}"):
        product(tmp_path, devices="0,1,2")
    gpus.faults.clear()
    resumed = product(tmp_path, devices="0,2", resume=True)
    np.testing.assert_array_equal(np.asarray(resumed), right)
    # The failed device's memory was freed and unpinned, or could not be. Its commands never run.
    gpus.memory._device.clear()
    gpus.memory._pinned.clear()


@pytest.mark.parametrize(("first", "second"), [("0,1", "0"), ("0", "0,1,2"), ("0,1,2", "1,2")])
def test_a_run_is_resumed_on_other_devices_with_the_same_bits(
    first: str, second: str, gpus: Device, tmp_path: Path
) -> None:
    right = np.asarray(product(tmp_path, "right"))
    writes = 0

    def stop(plan: Plan) -> Any:
        def observe(span: Any) -> None:
            nonlocal writes
            writes += span.kind == "write"
            if writes > plan.tiles.count * 2 // 3:
                raise KeyboardInterrupt

        return observe

    with pytest.raises(KeyboardInterrupt):
        product(tmp_path, devices=first, progress=stop)
    resumed = product(tmp_path, devices=second, resume=True)
    assert len(resumed.plan.done) > 0
    assert resumed.plan.devices == len(second.split(","))
    np.testing.assert_array_equal(np.asarray(resumed), right)


def test_a_tile_that_fails_its_checksums_is_computed_again(gpus: Device, tmp_path: Path) -> None:
    right, damaged = np.asarray(product(tmp_path, "right")), False
    sessions = sys.modules[f"{PACKAGE}.session"]
    submit = sessions.CudaSession.submit

    def damage(self: Any, operation: Any, host: Any, after: Any) -> Any:
        nonlocal damaged
        token = submit(self, operation, host, after)
        if operation.kind is Kind.MULTIPLY and operation.device == 1 and operation.step == 4 and not damaged:
            damaged = True
            token.synchronize()
            memory, at = gpus.memory, self._address(operation.writes[0])
            memory.matrix(at, np.float64, 1, 1, 1)[...] += 1e6
        return token

    with patch.object(sessions.CudaSession, "submit", damage):
        result = product(tmp_path, devices="0,1", verify=True)
    assert result.report.checks is not None
    assert len(result.report.checks["recomputed"]) == 1
    np.testing.assert_array_equal(np.asarray(result), right)


def test_a_device_without_room_is_named(gpus: Device, tmp_path: Path) -> None:
    gpus.faults["malloc"] = Fault(2, device=2)
    with pytest.raises(OutOfMemoryError, match="device 2: the device refuses"):
        product(tmp_path, devices="0,2")
    assert not (tmp_path / "C").exists()


def test_default_budgets_are_shares_of_the_free_memory_of_a_device(gpus: Device, tmp_path: Path) -> None:
    one, twice, two = (
        product(tmp_path, f"C{number}", devices=devices, device_memory=None, tile=None).plan.budgets.device
        for number, devices in enumerate(("0", "0,0", "0,1"))
    )
    assert two == one
    assert 0.9 * one <= 2 * twice <= one


@pytest.mark.parametrize(
    ("backend", "devices", "said"),
    [
        ("cuda", "0,3", "there is no CUDA device 3: 3 are visible"),
        ("cuda", "", "names no devices: write all, or numbers such as 0,1"),
        ("cuda", [], "names no devices: write all, or numbers such as 0,1"),
        ("cuda", "0,-1", "names no devices: write all, or numbers such as 0,1"),
        ("host", "0,1", "there is no device 1: the host backend has one, number 0"),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    backend: str, devices: Any, said: str, gpus: Device, tmp_path: Path
) -> None:
    kernel = "auto"
    with pytest.raises((InputError, oocgemm.BackendError), match=said):
        product(tmp_path, devices=devices, backend=backend, kernel=kernel)
    assert not (tmp_path / "C").exists()


def test_devices_of_different_kinds_are_refused(gpus: Device, tmp_path: Path) -> None:
    oocgemm.backends.open_backend("cuda")
    backend = sys.modules[f"{PACKAGE}.gpu"].CudaBackend
    describe = backend.describe

    def described(self: Any) -> dict[str, str]:
        found: dict[str, str] = describe(self)
        return found | ({"device": "an older GPU"} if self._device == 1 else {})

    with (
        patch.object(backend, "describe", described),
        pytest.raises(InputError, match="device 1 is an older GPU, device 0 is a fake GPU"),
    ):
        product(tmp_path, devices="0,1")


def test_device_and_devices_exclude_each_other(gpus: Device, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device = 1 and devices both name devices: drop device"):
        product(tmp_path, devices="0,1", device=1)
    assert product(tmp_path, devices="1").log.header["devices"][0]["number"] == "1"


def test_a_plan_for_several_devices_needs_no_device(tmp_path: Path) -> None:
    given: dict[str, Any] = {"backend": "cuda", "device_memory": "200MiB", "kernel": "cublas", "tile": TILE}
    planned = oocgemm.plan(A, B, devices=[0, 1], **given)
    assert planned.devices == 2
    assert "on each of 2 devices" in str(planned)
    with pytest.raises(InputError, match="pass their numbers, such as devices="):
        oocgemm.plan(A, B, devices="all", **given)
    with fake_cuda(devices=2) as gpus:
        np.testing.assert_allclose(np.asarray(planned.run()), A @ B, rtol=1e-10)
        gpus.check()


def test_sessions_on_one_gpu_share_its_link_and_its_kernels(tmp_path: Path) -> None:
    given: dict[str, Any] = {"backend": "cuda", "device_memory": "8GiB", "host_memory": "8GiB"}
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", "float64", (40000, 40000))
    alone, two, one = (
        oocgemm.plan(tmp_path / "a.npy", tmp_path / "a.npy", devices=devices, **given)
        for devices in ([0], [0, 1], [0, 0])
    )
    for rate in ("h2d", "d2h"):
        rates = [getattr(plan.machine, rate) for plan in (alone, two, one)]
        assert rates == [rates[0], rates[0], rates[0] / 2]
    assert one.machine.kernels["float64"].peak == alone.machine.kernels["float64"].peak / 2
    busy = [plan.prediction.lanes["compute"] for plan in (alone, two, one)]
    assert busy[1] < 0.6 * busy[0] < 0.6 * 1.2 * busy[2]


def test_the_command_line_takes_devices(tmp_path: Path) -> None:
    for name, values in (("A", A), ("B", B)):
        store(tmp_path / name, "raw", values)
    c = tmp_path / "C"
    operands = tmp_path / "A", tmp_path / "B"
    done = run(*operands, c, "--tile", TILE, "--devices", "0,0", "--json")
    assert done.json()["plan"]["devices"] == 2
    found: Any = zarr.open_array(c)[:]
    np.testing.assert_allclose(found, A @ B, rtol=1e-10)
    refused = run(*operands, c, "--devices", "0,1", "--overwrite")
    assert (refused.code, "there is no device 1" in refused.err) == (EXIT_USAGE, True)
    planned = command("plan", *operands, "--backend", "cuda", "--device-memory", "1GiB", "--devices", "0,1,2")
    assert "each of 3 devices" in planned.out


@pytest.mark.parametrize("devices", ["0,0", "0,0,0,0"])
def test_one_bound_on_memory_covers_all_sessions_of_the_host(devices: str) -> None:
    result = oocgemm.gemm(A, B, backend="host", memory="256MiB", devices=devices)
    plan = result.plan
    assert plan.devices * plan.budgets.device + plan.budgets.host <= 256 << 20
    np.testing.assert_allclose(np.asarray(result), A @ B, rtol=1e-12)
