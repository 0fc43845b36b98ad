"""Checksums on a device: digests, kernels/checks/check_sums.cu against NumPy, and their memory."""

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocgemm.backends.base import numpy_dtype
from oocgemm.backends.checksums import ChecksumDevice, CutFields, Multiplied, Summed, check_options
from oocgemm.integrity.tile_checks import Weights
from oocgemm.kernels.compile import compiled
from oocgemm.planning import DTYPES
from oocgemm.planning.device_memory import DIGEST_ROWS, Blocking, borders
from tests.support.backends_here import CUDA
from tests.support.native import launchers
from tests.support.nvrtc import Nvrtc, resources
from tests.support.problems import Array, integers
from tests.support.suite import examples, slow
from tests.support.summing import FLOATS, ModelDevice, plain_digest

# Digests


def whole(x: Array) -> int:
    return Weights(len(x), x.shape[1] * 4).digest(x, 0, 0, DIGEST_ROWS)


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_pieces_in_any_order_make_up_the_digest(data: st.DataObject) -> None:
    dtype = numpy_dtype(data.draw(st.sampled_from(FLOATS)))
    rows, cols = data.draw(st.integers(1, 3 * DIGEST_ROWS)), data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.integers(0, 256, (rows, cols * dtype.itemsize), np.uint8).view(dtype)
    cuts = [
        sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=3))})
        for extent in (rows, cols)
    ]
    pieces = [(r, c) for r in pairwise(cuts[0]) for c in pairwise(cuts[1])]
    weights = Weights(rows, cols * 4)
    every = data.draw(st.sampled_from([1, DIGEST_ROWS]))
    parts = [
        weights.digest(x[r[0] : r[1], c[0] : c[1]], r[0], c[0], every)
        for r, c in data.draw(st.permutations(pieces))
    ]
    assert sum(parts) % 2**32 == plain_digest(x, every)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_digest_tells_what_is_another_panel(dtype: str) -> None:
    """The digest changes if any bit of the rows that it covers is flipped.

    It also changes if rows, columns or elements are swapped, even if they differ only in their signs.
    """
    rng = np.random.default_rng(1)
    kind = numpy_dtype(dtype)
    normal = rng.standard_normal((40 * DIGEST_ROWS, 30))
    for values in (normal, np.sign(normal)):
        x = values.astype(kind)
        right = whole(x)
        raw = x.view(np.uint8)
        for bit in range(8 * kind.itemsize):
            changed = raw.copy()
            changed[17 * DIGEST_ROWS, 12 * kind.itemsize + bit // 8] ^= 1 << bit % 8
            assert whole(changed.view(kind)) != right
        rows, cols, two = np.arange(40 * DIGEST_ROWS), np.arange(30), x.copy()
        rows[[5 * DIGEST_ROWS, 9 * DIGEST_ROWS]] = 9 * DIGEST_ROWS, 5 * DIGEST_ROWS
        cols[[4, 21]] = 21, 4
        ends = (0, 3 * DIGEST_ROWS), (2, 20)
        two[ends] = 1, -1
        swapped = two.copy()
        swapped[ends] = -1, 1
        assert whole(two) != whole(swapped)
        for other in (x[rows], x[:, cols], x[::-1].copy(), x[:, ::-1].copy(), np.roll(x, 1, axis=1)):
            assert whole(np.ascontiguousarray(other)) != right


def test_integers_have_digests_of_their_own() -> None:
    """Panels with few bits set, such as small integers, have different digests."""
    rng = np.random.default_rng(5)
    found = {whole(integers(rng, (20, 20), "float64", most=1)) for _ in range(500)}
    assert len(found) == 500


# The kernels


@dataclass
class Case:
    """A kernel launch: its memory, where named arrays are in it, and their expected content afterwards."""

    macros: tuple[str, ...]
    entry: str
    grid: tuple[int, int, int]
    memory: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    outputs: dict[str, tuple[int, Any, tuple[int, ...]]] = field(default_factory=dict)
    sizes: dict[str, Array] = field(default_factory=dict)

    def put(self, x: Array) -> int:
        """Add an array to the memory, and return its offset."""
        start = -(-self.memory.size // 16) * 16
        self.memory = np.concatenate(
            [self.memory, np.zeros(start - self.memory.size, np.uint8), x.reshape(-1).view(np.uint8)]
        )
        return start

    def out(self, name: str, x: Array) -> int:
        start = self.put(x)
        self.outputs[name] = start, x.dtype, x.shape
        return start

    def results(self, memory: Array) -> dict[str, Array]:
        return {
            name: memory[start:][: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            for name, (start, dtype, shape) in self.outputs.items()
        }


Built = tuple[Case, Callable[[int], ctypes.Structure]]
Runs = Callable[[Case, Callable[[int], ctypes.Structure]], Array]


def panel_values(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> Array:
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    if dtype in ("float64", "complex128"):
        x[5:40, 3:70] *= 1e290  # squares of these elements overflow, or underflow in the rows below
        x[90:120] *= 1e-290
        x[130:] *= 1e-200
    if DTYPES[dtype].is_complex:
        x = x + 1j * rng.standard_normal(shape)
    x = x.astype(numpy_dtype(dtype))
    x[77, 11], x[12, 140], x[12, 3] = np.inf, np.nan, -np.inf
    return np.asarray(x)


def cut_fields(cut: Blocking) -> CutFields:
    return CutFields(cut.extent, cut.strip, cut.size, cut.per)


def panel(dtype: str, axis: int, conjugates: bool = False) -> Built:
    rng, cut, depth = np.random.default_rng(2), Blocking.of(190, 150), 157
    x = panel_values(rng, (cut.extent, depth), dtype)
    wide = np.complex128 if DTYPES[dtype].is_complex else np.float64
    options = check_options(dtype, DTYPES[dtype].accumulator, axis)
    case = Case(options, "check_panel", (2, cut.blocks, 1))
    at = {"x": case.put(np.ascontiguousarray(x.T if axis else x))}
    at["head"] = case.out("head", np.zeros(2, np.uint64))
    at["flags"] = case.out("flags", np.zeros(cut.extent, np.uint8))
    at["norms"] = case.out("norms", np.full((cut.blocks, 2), 7.0))
    at["sums"] = case.out("sums", np.full((cut.blocks, depth), 7.0, wide))
    case.sizes["sums"] = np.add.reduceat(np.abs(x.astype(wide)), borders(cut.extent, cut.strip)[:-1], axis=0)
    return case, lambda base: Summed(
        **{name: base + start for name, start in at.items()}, rows=cut_fields(cut), depth=depth,
        pitch=cut.extent if axis else depth, first_row=1000, row_signs=9, conjugates=conjugates,
    )  # fmt: skip


def strip(dtype: str) -> Built:
    rng, rows, cols, room = np.random.default_rng(3), Blocking.of(190, 150), Blocking.of(300, 300), 5
    x = panel_values(rng, (rows.extent, cols.extent), dtype)
    wide = np.complex128 if DTYPES[dtype].is_complex else np.float64
    options = check_options(dtype, DTYPES[dtype].accumulator, 0)
    case = Case(options, "check_strip", (cols.blocks, rows.blocks, 1))
    at = {"x": case.put(x), "head": case.out("head", np.zeros(2, np.uint64))}
    at["flags"] = case.out("flags", np.zeros(rows.extent, np.uint8))
    at["norms"] = case.out("norms", np.full((rows.blocks, room), 7.0))
    at["sums"] = case.out("sums", np.full((rows.blocks, room), 7.0, wide))
    size = np.add.reduceat(np.abs(x.astype(wide)), borders(rows.extent, rows.strip)[:-1], axis=0)
    size = np.add.reduceat(size, borders(cols.extent, cols.strip)[:-1], axis=1)
    case.sizes["sums"] = np.pad(size, ((0, 0), (0, room - cols.blocks)))
    return case, lambda base: Summed(
        **{name: base + start for name, start in at.items()}, rows=cut_fields(rows), cols=cut_fields(cols),
        pitch=cols.extent, sums_pitch=room, first_row=11, first_col=1 << 33, row_signs=8, col_signs=9,
    )  # fmt: skip


def product(dtype: str, first: bool, wrong: int = 0, depth: int = 70) -> Built:
    """Build a launch that multiplies checksums: 20 by 18 blocks, of which 3 blocks of rows are a strip."""
    rng, down, across, per, strip, cols, pitch = np.random.default_rng(4), 20, 18, 3, 40, 333, 21
    rows, strips = 260, 7
    wide = np.complex128 if DTYPES[dtype].is_complex else np.float64
    case = Case(
        check_options(dtype, DTYPES[dtype].accumulator, 0),
        "check_product",
        (-(-across // 16), -(-down // 16), 1),
    )
    at: dict[str, int] = {}
    chunks = -(-depth // 35)  # fewer chunks than the maximum, as for a shallow panel
    for name, count, extent in (("a", down, rows), ("b", across, cols)):
        sums = rng.standard_normal((count, depth))
        at[name] = case.put(sums + 1j * sums[::-1] if wide is np.complex128 else sums)
        at[f"{name}_norms"] = case.put(10.0 ** rng.integers(-160, 150, (count, max(1, chunks))))
        at[f"{name}_head"] = case.put(np.array([3 + (wrong == ord(name)), name == "a"], np.uint64))
        at[f"{name}_flags"] = case.put(rng.integers(0, 2, extent, np.uint8))
    # Each strip stores, in this order: a head, sums, norms, and flags of rows and of columns.
    item = np.dtype(wide).itemsize
    sums_at, norms_at = 16, 16 + per * pitch * item
    rows_at = norms_at + 8 * per * pitch
    size = -(-(rows_at + strip + cols) // 16) * 16
    start = case.put(np.zeros(strips * size, np.uint8))
    for s in range(strips):
        case.memory[start + s * size :][:16].view(np.uint64)[0] = s % 2
        case.memory[start + s * size + 16 :][: rows_at - 16].view(float)[...] = s
        case.memory[start + s * size + rows_at :][: strip + cols] = rng.integers(0, 2, strip + cols)
        for name, offset, kind, shape in (
            ("head", 0, np.uint64, (2,)),
            ("sums", sums_at, wide, (per, pitch)),
            ("norms", norms_at, np.float64, (per, pitch)),
            ("flags", rows_at, np.uint8, (strip + cols,)),
        ):
            case.sizes[f"sums of strip {s}"] = np.full((per, pitch), 10.0 * depth + 10)
            case.outputs[f"{name} of strip {s}"] = start + s * size + offset, np.dtype(kind), shape
    return case, lambda base: Multiplied(
        **{name: base + where for name, where in at.items()}, a_expected=3, b_expected=3, strips=base + start,
        strip_bytes=size, made=0, sums=sums_at, norms=norms_at, row_flags=rows_at, col_flags=rows_at + strip,
        depth=depth, chunks=chunks, rows=rows, cols=cols, strip=strip, down=down, across=across, pitch=pitch,
        per=per, first=first,
    )  # fmt: skip


def on_host(device: ChecksumDevice) -> Runs:
    def run(case: Case, given: Callable[[int], ctypes.Structure]) -> Array:
        memory = np.empty(case.memory.size + 16, np.uint8)
        memory = memory[-memory.ctypes.data % 16 :][: case.memory.size]
        memory[...] = case.memory
        device.load(case.entry, case.macros)
        device.launch(case.entry, case.macros, case.grid, given(memory.ctypes.data))
        return memory

    return run


class LockstepDevice(ModelDevice):
    """Runs the CUDA kernels themselves on the processor, compiled by g++."""

    def launch(
        self, entry: str, macros: tuple[str, ...], grid: tuple[int, int, int], given: ctypes.Structure
    ) -> None:
        entries = "check_panel", "check_strip", "check_product"
        launchers("check_sums", entries, macros)[entry](grid, (256, 1, 1), given)


def check(case: Case, given: Callable[[int], ctypes.Structure], run: Runs) -> dict[str, Array]:
    """Run a case, and compare its results with those of NumPy.

    Floating-point numbers must agree within rounding. Everything else, and which numbers are nonfinite, must
    be equal.
    """
    expected = case.results(on_host(ModelDevice())(case, given))
    got = case.results(run(case, given))
    for name, wanted in expected.items():
        if wanted.dtype.kind not in "fc":
            np.testing.assert_array_equal(got[name], wanted, err_msg=name)
            continue
        there = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(got[name]), there, err_msg=name)
        # Sum of the magnitudes of all terms, to which rounding errors are proportional.
        size = case.sizes.get(name, np.abs(wanted))
        off = np.abs(np.where(there, got[name], 0) - np.where(there, wanted, 0))
        assert (off <= 1e-14 * np.where(np.isfinite(size), size, np.inf)).all(), name
    return got


CASES = [
    pytest.param("float64", lambda: panel("float64", 0), id="panel-float64", marks=pytest.mark.slow),
    pytest.param("complex64", lambda: panel("complex64", 1, True), id="panel-complex64-columns"),
    pytest.param(
        "bfloat16", lambda: panel("bfloat16", 1), id="panel-bfloat16-columns", marks=pytest.mark.slow
    ),
    pytest.param("float64", lambda: strip("float64"), id="strip-float64"),
    pytest.param("float64", lambda: product("float64", True), id="product-first"),
    pytest.param("complex64", lambda: product("complex64", False), id="product-complex"),
    pytest.param("float64", lambda: product("float64", False, ord("b")), id="product-of-a-wrong-panel"),
    pytest.param("float64", lambda: product("float64", True, depth=0), id="product-of-nothing"),
]
MORE = [
    *(
        pytest.param(dtype, lambda d=dtype, a=axis: panel(d, a, True), id=f"panel-{dtype}-{axis}")
        for dtype in FLOATS
        for axis in (0, 1)
    ),
    *(pytest.param(dtype, lambda d=dtype: strip(d), id=f"strip-{dtype}") for dtype in FLOATS),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(("dtype", "build"), CASES)
def test_the_kernels_are_what_numpy_does(dtype: str, build: Callable[[], Built]) -> None:
    case, made = build()
    got = check(case, made, on_host(LockstepDevice()))
    if case.entry == "check_panel":
        assert np.flatnonzero(got["flags"]).tolist() == [12, 77]
        finite = ~np.isin(np.arange(len(got["norms"])), (0, 1))
        assert np.isfinite(got["norms"]).any()
        assert (got["norms"][finite] > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device answers")
@pytest.mark.parametrize(("dtype", "build"), [*CASES, *MORE])
def test_the_kernels_on_a_device_are_what_numpy_does(dtype: str, build: Callable[[], Built]) -> None:
    import cupy

    from oocgemm.backends.cuda.launch import Kernels
    from oocgemm.backends.cuda.session import SumsDevice

    def run(case: Case, given: Callable[[int], ctypes.Structure]) -> Array:
        memory = cupy.asarray(case.memory)
        SumsDevice(Kernels(0)).launch(case.entry, case.macros, case.grid, given(memory.data.ptr))
        return np.asarray(memory.get())

    check(*build(), run)


@pytest.mark.parametrize("arch", ["sm_80", *slow(("sm_90",), ("sm_100",))])
def test_the_kernels_compile_without_spills(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    cubin = tmp_path / "code.cubin"
    dtype, axis = {"sm_80": ("float16", 0), "sm_90": ("float64", 1), "sm_100": ("complex128", 0)}[arch]
    options = check_options(dtype, DTYPES[dtype].accumulator, axis)
    cubin.write_bytes(compiled(Nvrtc(), "check_sums", arch, options))
    for entry in ("check_panel", "check_strip", "check_product"):
        taken = resources(cubin, entry)
        assert taken.local == 0, f"{entry} of {dtype} for {arch} spills: {taken}"
        assert taken.registers <= 64, f"{entry} of {dtype} for {arch}: {taken}"
