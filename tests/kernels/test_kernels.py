"""Kernels compile for each of their architectures, and the compile cache works.

No kernel spills registers, and each uses its tensor instruction.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocgemm.errors import BackendError, InputError
from oocgemm.kernels import RUNGS, ladder
from oocgemm.kernels import compile as compiling
from oocgemm.kernels.compile import compiled, kernel_folder, kernel_path
from oocgemm.kernels.ladder import LADDER
from oocgemm.kernels.launches import combine_options, multiply_options, split_options
from oocgemm.kernels.spec import H200, Call, Device, Kernel, Params, options
from oocgemm.planning import DTYPES, Op
from oocgemm.planning.emulation import MODULI_COUNTS
from tests.support.gemm_cases import OP_PAIRS
from tests.support.nvrtc import Nvrtc, instructions, resources
from tests.support.problems import applied, integers, stored
from tests.support.suite import each_value, thinned

REAL_PAIRS = [(op_a, op_b) for op_a in (Op.N, Op.T) for op_b in (Op.N, Op.T)]
ENTRIES = [
    pytest.param(kernel, arch, id=f"{kernel.name}-{kernel.source}-{arch}")
    for kernel in LADDER
    for arch in kernel.archs
]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_code(
    kernel: Kernel, arch: str, dtype: str, ops: tuple[Op, Op], params: Params, folder: Path
) -> None:
    """Compile a kernel.

    Fail if it uses local memory, into which registers spill, or lacks its instruction.
    """
    if kernel.refuses(call(256, 256, 256, dtype, ops), params) is not None:
        return
    macros, cubin = options(kernel, dtype, *ops, params), folder / "code.cubin"
    cubin.write_bytes(compiled(Nvrtc(), kernel.source, arch, macros))
    taken = resources(cubin, kernel.entry or kernel.source)
    assert (taken.stack, taken.local) == (0, 0), f"{kernel.source} for {arch} with {macros} spills: {taken}"
    if kernel.instruction is not None:
        found = instructions(cubin)
        assert kernel.instruction in found, (
            f"{kernel.source} for {arch} has no {kernel.instruction}: {sorted(found)}"
        )


def call(
    m: int, n: int, k: int, dtype: str = "float64", ops: tuple[Op, Op] = (Op.N, Op.N), **more: object
) -> Call:
    lda, ldb = (m if ops[0].swaps else k), (k if ops[1].swaps else n)
    made = Call(dtype, *ops, m, n, k, 1.0, 0, lda, 0, ldb, 0.0, 0, n)
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kernel",
    [
        # Compiling tensor_f64 takes longest, and tensor_f64_tma uses the same instruction.
        pytest.param(kernel, id=source, marks=[pytest.mark.slow] if source == "tensor_f64" else [])
        for source, kernel in {x.source: x for x in reversed(LADDER)}.items()
    ],
)
def test_the_default_variant_compiles_without_spills(kernel: Kernel, tmp_path: Path) -> None:
    check_code(kernel, max(kernel.archs), kernel.dtypes[0], (Op.N, Op.T), kernel.variants[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "arch"), ENTRIES)
def test_every_variant_compiles_without_spills(kernel: Kernel, arch: str, tmp_path: Path) -> None:
    wanted = [(kernel.dtypes[0], (Op.N, Op.T), params) for params in kernel.variants]
    if arch == max(kernel.archs):
        default, last = kernel.variants[0], kernel.dtypes[-1]
        # For real numbers, the conjugate transpose is the transpose.
        pairs = OP_PAIRS if DTYPES[last].is_complex else REAL_PAIRS
        wanted += [(dtype, (Op.N, Op.T), default) for dtype in kernel.dtypes[1:]]
        wanted += [(last, ops, default) for ops in pairs if (last, ops, default) not in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC releases the GIL, so threads compile in parallel
        checks = []
        for number, (dtype, ops, params) in enumerate(wanted):
            (folder := tmp_path / str(number)).mkdir()
            checks.append(pool.submit(check_code, kernel, arch, dtype, ops, params, folder))
    for check in checks:
        check.result()


def test_the_check_sees_a_spill_and_a_missing_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = next(kernel for kernel in LADDER if kernel.name == "register")
    variant = "float64", (Op.N, Op.N), {"TILE": 32, "RESULTS": 16}
    check_code(replace(kernel, instruction="DFMA"), "sm_90a", *variant, tmp_path)
    with pytest.raises(AssertionError, match="has no DMMA"):
        check_code(replace(kernel, instruction="DMMA"), "sm_90a", *variant, tmp_path)
    source = edited_kernels(tmp_path, monkeypatch) / "plain" / "register.cu"
    text = source.read_text(encoding="utf-8")
    # This leaves 32 registers per thread, which are too few.
    crowded = text.replace("__launch_bounds__(THREADS, 1)", "__launch_bounds__(THREADS, 32)")
    assert crowded != text
    source.write_text(crowded, encoding="utf-8")
    with pytest.raises(AssertionError, match="spills"):
        check_code(kernel, "sm_90a", *variant, tmp_path)


def edited_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sources of the kernels, and compile from the copy instead."""
    folder = tmp_path / "kernels"
    shutil.copytree(kernel_folder(), folder)
    monkeypatch.setattr(compiling, "kernel_folder", lambda: folder)
    return folder


def test_finish_compiles_for_c_narrower_than_the_accumulator() -> None:
    for narrow in ("half_t", "bfloat_t"):
        assert compiled(Nvrtc(), "finish", "sm_80", (f"-DOOC_STORED={narrow}", "-DOOC_ACCUMULATED=float"))


@pytest.mark.parametrize("arch", thinned(("sm_80", "sm_90a", "sm_100"), ("sm_90a",)))
def test_kernels_of_int8_products_compile_without_spills(arch: str, tmp_path: Path) -> None:
    dtype, cubin = ("float32" if arch == "sm_100" else "float64"), tmp_path / "code.cubin"
    most = MODULI_COUNTS[dtype][-1]
    fused = (("ozaki_multiply", ("ozaki_multiply",), multiply_options(most)),) if arch == "sm_90a" else ()
    for source, entries, macros in (
        ("ozaki_split", ("ozaki_facts", "ozaki_split"), split_options(dtype, arch == "sm_80", most)),
        ("ozaki_reduce", ("ozaki_reduce",), ()),
        ("ozaki_combine", ("ozaki_combine",), combine_options(dtype, most)),
        *fused,
    ):
        cubin.write_bytes(compiled(Nvrtc(), source, arch, macros))
        for entry in entries:
            taken = resources(cubin, entry)
            assert (taken.stack, taken.local) == (0, 0), f"{entry} for {arch} spills: {taken}"
        if source == "ozaki_multiply":
            assert "IGMMA" in instructions(cubin)


def test_parameters_that_cannot_be_say_why() -> None:
    with pytest.raises(BackendError) as caught:
        compiled(Nvrtc(), "tiled", "sm_80", ("-DTILE=33", *options(LADDER[0], "float32", Op.N, Op.N, {})))
    message = str(caught.value)
    assert "kernel tiled does not compile for sm_80" in message
    assert "a block has at most 1024 threads" in message
    assert "static_assert(TILE * TILE <= 1024" in message  # the message contains the line of the source
    assert "-DTILE=33" in message


class Counting(Nvrtc):
    """A fake compiler that counts its calls. Its version can be chosen."""

    def __init__(self, version: str = "1.0") -> None:
        self.calls, self._version = 0, version

    def version(self) -> str:
        return self._version

    def compile(self, name: str, source: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        self.calls += 1
        return b"code", ""


def test_what_was_compiled_is_kept_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    folder, compiler = edited_kernels(tmp_path, monkeypatch), Counting()
    for _ in range(2):
        assert compiled(compiler, "naive_grid", "sm_80", ("-DX=1",)) == b"code"
    assert compiler.calls == 1
    assert len(list((cache_folder / "kernels").iterdir())) == 1
    compiled(compiler, "naive_grid", "sm_80", ("-DX=2",))
    compiled(compiler, "naive_grid", "sm_90a", ("-DX=1",))
    assert compiler.calls == 3
    # The source includes naive.cu, which includes scalar.cuh.
    for changed in ("common/scalar.cuh", "plain/naive.cu"):
        path = folder / changed
        path.write_text(path.read_text(encoding="utf-8") + "\n// changed\n", encoding="utf-8")
        compiled(compiler, "naive_grid", "sm_80", ("-DX=1",))
    assert compiler.calls == 5
    (folder / "common" / "finish.cu").write_text("// not included\n", encoding="utf-8")
    compiled(compiler, "naive_grid", "sm_80", ("-DX=1",))
    assert compiler.calls == 5
    newer = Counting("1.1")
    compiled(newer, "naive_grid", "sm_80", ("-DX=1",))
    assert newer.calls == 1


def test_a_cache_that_cannot_be_written_to_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OOCGEMM_CACHE", str(tmp_path / "file"))
    compiler = Counting()
    for _ in range(2):
        assert compiled(compiler, "tiled", "sm_80", ()) == b"code"
    assert compiler.calls == 2


def test_names_are_the_rungs_and_each_has_its_source() -> None:
    assert len(RUNGS) == len(set(RUNGS)) >= 7
    for kernel in LADDER:
        text = kernel_path(kernel.source).read_text(encoding="utf-8")
        assert f" {kernel.entry or kernel.source}(" in text or f"ENTRY {kernel.source}" in text, kernel.source
        assert all(dict(variant).keys() == dict(kernel.variants[0]).keys() for variant in kernel.variants)
        assert all(
            f"#define {name} " in text + kernel_path("naive").read_text() for name in kernel.variants[0]
        )


def test_an_entry_is_compiled_for_the_device_at_hand() -> None:
    kernel = replace(LADDER[0], archs=("sm_80", "sm_90a"))
    targets = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (12, 0): "sm_120", (7, 5): None}
    assert {c: kernel.target(Device(c, 1, 1)) for c in targets} == targets
    assert replace(kernel, archs=("sm_90a",)).target(Device((10, 0), 1, 1)) is None


def test_the_first_entry_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(LADDER[0], name="x", refuses=lambda call, params: "lda is odd" if call.lda % 2 else None)
    slow = replace(LADDER[0], name="x", dtypes=("float32",))
    monkeypatch.setattr(ladder, "LADDER", (fast, slow))
    assert ladder.choose("x", call(4, 4, 4, "float32")) == (fast, fast.variants[0])
    assert ladder.choose("x", call(4, 4, 3, "float32")) == (slow, slow.variants[0])
    other = {"BLOCK_X": 1, "BLOCK_Y": 1}  # parameters that only a tuner tries
    slow = replace(slow, variants=(*slow.variants, other))
    monkeypatch.setattr(ladder, "LADDER", (fast, slow))
    assert ladder.choose("x", call(4, 4, 4, "float32"), other) == (slow, other)
    assert ladder.choose("x", call(4, 4, 4, "float64"), other) == (fast, fast.variants[0])
    assert ladder.choose("x", call(4, 4, 4, "float64"), {"GONE": 1}) == (fast, fast.variants[0])
    with pytest.raises(
        InputError, match="kernel x cannot do this product: lda is odd; or it multiplies float32, not"
    ):
        ladder.choose("x", call(4, 4, 3))
    with pytest.raises(InputError, match="computes in native precision, not tf32"):
        ladder.choose("x", call(4, 4, 4, "float32", compute="tf32"))
    with pytest.raises(InputError, match=r"needs sm_80 or .*, but the device has compute capability 7\.0"):
        ladder.choose("x", call(4, 4, 4, "float32", device=Device((7, 0), 1, 1)))


def test_kernels_say_what_they_cannot_do() -> None:
    with pytest.raises(InputError, match="at most 524280 rows, but C has 524281: use naive_grid"):
        ladder.choose("naive", call(65535 * 8 + 1, 1, 1))
    assert ladder.choose("naive", call(65535 * 8, 1, 1))
    # The largest m + n for k = 1, since (m + n) k elements of 16 bytes must fit into shared memory.
    largest = H200.shared_bytes // 16
    assert ladder.choose("single_block", call(largest - 1, 1, 1, "complex128"))
    with pytest.raises(InputError, match=f"op.A. {largest} x 1 and op.B. 1 x 1, {(largest + 1) * 16} bytes"):
        ladder.choose("single_block", call(largest, 1, 1, "complex128"))


@each_value
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("rung", "dtype", "compute"),
    [
        *(("simt", dtype, "native") for dtype in ("float32", "float64")),
        *(("tensor", dtype, "native") for dtype in ("float64", "float16", "bfloat16")),
        ("tensor", "float32", "tf32"),
    ],
)
def test_some_entry_of_a_fast_rung_takes_any_call(
    rung: str, dtype: str, compute: str, capability: tuple[int, int]
) -> None:
    device, item = (
        Device(capability, 100, 163 << 10 if capability[0] == 8 else 227 << 10),
        DTYPES[dtype].itemsize,
    )
    for ops in REAL_PAIRS:
        for shape, address in (((1, 1, 1), item), ((4096, 4096, 4096), 256), ((7, 1 << 33, 0), 256)):
            kernel, params = ladder.choose(
                rung, call(*shape, dtype, ops, a=address, b=2 * item, compute=compute, device=device)
            )
            assert kernel.launch(call(*shape, dtype, ops), params).grid[0] > 0
    whole = call(4096, 4096, 4096, dtype, a=256, b=512, compute=compute, device=device)
    taken, _ = ladder.choose(rung, whole)
    if rung == "tensor":
        hopper, others = (
            ("tensor_f64_tma", "tensor_f64") if dtype == "float64" else ("tensor_wgmma", "tensor_mma")
        )
        assert taken.source == (hopper if capability == (9, 0) else others)


def test_what_the_copy_engine_is_told_covers_the_operands() -> None:
    for kernel in (kernel for kernel in LADDER if kernel.maps is not None):
        for dtype, ops, params in product(kernel.dtypes, REAL_PAIRS, kernel.variants):
            wanted = call(520, 264, 136, dtype, ops, compute=kernel.compute[0], device=H200)
            if kernel.refusal(wanted, params) is not None:
                continue
            assert kernel.maps is not None
            item, launch = DTYPES[dtype].itemsize, kernel.launch(wanted, params)
            assert launch.grid[0] % params["CLUSTER"] == 0
            assert launch.grid[0] <= H200.processors
            for told, op, shape in zip(
                kernel.maps(wanted, params), ops, ((520, 136), (136, 264)), strict=True
            ):
                assert told.extents == stored(op, *shape)[::-1]
                assert told.pitches == (told.extents[0] * item,)
                assert (told.box[0] * item, told.swizzle) == (128, 128)
                assert told.box[1] <= 256


@given(data=st.data())
def test_submatrices_cover_c_exactly(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 20)) for _ in range(3))
    ops = data.draw(st.sampled_from(OP_PAIRS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    a, b = integers(rng, stored(ops[0], m, k), "float32"), integers(rng, stored(ops[1], k, n), "float32")
    c, kernel = np.zeros((m, n), "float32"), next(kernel for kernel in LADDER if kernel.name == "naive_grid")
    cover = {"COVER_M": data.draw(st.integers(1, 9)), "COVER_N": data.draw(st.integers(1, 9))}
    for part in kernel.parts(call(m, n, k, "float32", ops), cover):
        left, right = (
            np.lib.stride_tricks.as_strided(x.reshape(-1)[at // 4 :], stored(op, rows, cols), (4 * ld, 4))
            for x, at, op, rows, cols, ld in (
                (a, part.a, ops[0], part.m, k, part.lda),
                (b, part.b, ops[1], k, part.n, part.ldb),
            )
        )
        i, j = divmod(part.c // 4, n)
        c[i : i + part.m, j : j + part.n] += applied(ops[0], left) @ applied(ops[1], right)
    np.testing.assert_array_equal(c, applied(ops[0], a) @ applied(ops[1], b))
