"""The library's interface: results, logs, errors, and the types that type checkers see."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import BudgetError, InputError, NotFoundError
from oocgemm.jobs import prepare
from oocgemm.jobs.option_groups import Options
from oocgemm.jobs.options import options_of
from oocgemm.jobs.request import PLACES, Destination, Request

A, B = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)
MIB = 1 << 20


def test_matmul_returns_the_product_as_an_ndarray() -> None:
    product = oocgemm.matmul(A, B, backend="host")
    assert type(product) is np.ndarray
    np.testing.assert_array_equal(product, A @ B)


def test_matmul_returns_out() -> None:
    out = np.empty((3, 5))
    assert oocgemm.matmul(A, B, out=out, backend="host") is out


@pytest.mark.parametrize(("name", "kind"), [("c.zarr", zarr.Array), ("c.npy", np.memmap)])
def test_matmul_returns_the_array_at_a_path(tmp_path: Path, name: str, kind: Any) -> None:
    product: Any = oocgemm.matmul(A, B, out=tmp_path / name, backend="host")
    assert isinstance(product, kind)
    np.testing.assert_array_equal(product[:], A @ B)


def test_gemm_returns_a_result() -> None:
    result = oocgemm.gemm(A, B, backend="host")
    assert isinstance(result, oocgemm.Result)
    np.testing.assert_array_equal(result.out, A @ B)


@pytest.mark.parametrize("call", [oocgemm.matmul, oocgemm.gemm, oocgemm.plan])
def test_an_unknown_option_is_a_type_error(call: Any) -> None:
    with pytest.raises(TypeError, match=r"unexpected option 'tiles': it takes .*tile"):
        call(A, B, tiles="2x2x2")


def test_every_option_is_one_of_the_request() -> None:
    def option(of: Request, name: str) -> Any:
        part, field = PLACES.get(name, ("", name))
        return getattr(getattr(of, part) if part else of, field)

    request = Request.of(A, B, Destination.parse(None))
    for name, one in options_of(Options).items():
        assert option(request, name) == one.default
    given = {"beta": 2.0, "host_memory": 5, "trans_b": "T", "device": 2, "resume": True}
    changed = request.with_options(**given)
    assert {name: option(changed, name) for name in given} == given
    assert changed.with_options(**{name: option(request, name) for name in given}) == request


# Plans that can be run later.


def test_a_plan_runs() -> None:
    planned = oocgemm.plan(A, B, alpha=2, tile="2x2x2", backend="host")
    for result in (planned.run(), oocgemm.gemm(plan=planned)):
        np.testing.assert_array_equal(result.out, 2 * (A @ B))
        assert result.plan.candidate == planned.candidate
        assert result.plan.budgets == planned.budgets


def test_a_plan_takes_options_of_its_run(tmp_path: Path) -> None:
    for name, operand in (("a.npy", A), ("b.npy", B)):
        np.save(tmp_path / name, operand)
    planned = oocgemm.plan(tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c", backend="host")
    planned.run(timeline=tmp_path / "log")
    assert oocgemm.report(tmp_path / "log").flops == planned.flops
    with pytest.raises(InputError, match="C exists"):
        planned.run()
    assert planned.run(resume=True).plan.steps == 0
    assert planned.run(overwrite=True).plan.steps == planned.steps


def test_a_plan_of_a_verified_run_verifies() -> None:
    assert oocgemm.plan(A, B, verify=True, backend="host").run().report.checks


def test_operands_are_refused_beside_a_plan() -> None:
    planned = oocgemm.plan(A, B, backend="host")
    with pytest.raises(InputError, match="plan already contains a, alpha: drop"):
        oocgemm.gemm(A, plan=planned, alpha=2)
    with pytest.raises(TypeError, match="unexpected option 'alpha'"):
        planned.run(alpha=2)  # type: ignore[call-arg]


def test_a_plan_is_refused_once_operands_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", A)
    planned = oocgemm.plan(tmp_path / "a.npy", B, backend="host")
    np.save(tmp_path / "a.npy", np.ones((6, 4)))
    with pytest.raises(InputError, match=r"A, B or C have other .* call oocgemm\.plan again"):
        planned.run()


def test_a_plan_prints_what_was_decided() -> None:
    planned = oocgemm.plan(A, B, tile="2x2x2", backend="host", memory="64MiB")
    shown = str(planned)
    for part in (
        "C 3 x 5 float64 = op(A) 3 x 4 @ op(B) 4 x 5",
        "tile 2 x 2, panels 2 deep: 2 x 3 tiles",
        "of 48 MiB",
        "predicted: ",
    ):
        assert part in shown
    assert repr(planned).startswith("<Plan C 3 x 5")
    assert "\n" not in repr(planned)


# Errors that Python programs expect.


@pytest.mark.parametrize("call", [oocgemm.matmul, oocgemm.plan])
@pytest.mark.parametrize("name", ["missing.zarr", "missing.npy"])
def test_a_missing_path_is_a_file_not_found_error(tmp_path: Path, call: Any, name: str) -> None:
    for kind in (FileNotFoundError, ValueError, InputError):
        with pytest.raises(kind, match="there is nothing at"):
            call(tmp_path / name, B, backend="host")
    with pytest.raises(NotFoundError, match=r"beta = 1.0 needs an existing C, and there is nothing at"):
        oocgemm.gemm(A, B, tmp_path / name, beta=1, backend="host")


def test_wrong_input_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="shapes do not match"):
        oocgemm.matmul(A, A, backend="host")


def test_a_small_budget_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot hold the smallest plan") as raised:
        oocgemm.matmul(A, B, backend="host", device_memory=1)
    assert isinstance(raised.value, BudgetError)


# The option `memory`, which limits host and device memory together.


def test_memory_bounds_both_budgets_together() -> None:
    planned = oocgemm.plan(A, B, backend="host", memory="64MiB")
    assert planned.budgets.device + planned.budgets.host == 64 * MIB


def test_memory_is_split_by_what_chunks_require(tmp_path: Path) -> None:
    """The host budget must be larger than a quarter of the memory, to decode one chunk."""
    a = np.random.default_rng(1).random((1024, 1024))
    zarr.create_array(tmp_path / "a", data=a, chunks=(1024, 1024))
    options: dict[str, Any] = {"backend": "host", "memory": "40MiB"}
    planned = oocgemm.plan(tmp_path / "a", a, **options)
    assert planned.budgets.host > 10 * MIB
    assert planned.budgets.device + planned.budgets.host == 40 * MIB
    np.testing.assert_allclose(oocgemm.matmul(tmp_path / "a", a, **options), a @ a)


def test_the_least_memory_named_suffices(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a", data=np.ones((300, 400)), chunks=(300, 400))
    for operand in (np.ones((300, 400)), tmp_path / "a"):
        with pytest.raises(
            BudgetError, match=r"memory 1 KiB cannot hold the smallest plan .*--memory"
        ) as raised:
            oocgemm.plan(operand, np.ones((400, 5)), backend="host", memory=1024)
        least = raised.value.least
        assert least is not None
        product = oocgemm.matmul(operand, np.ones((400, 5)), backend="host", memory=least)
        np.testing.assert_array_equal(product, np.full((300, 5), 400.0))


def test_memory_excludes_the_two_budgets() -> None:
    with pytest.raises(InputError, match="drop device_memory"):
        oocgemm.plan(A, B, backend="host", memory="1GiB", device_memory="1GiB")


# Logging.


def test_a_run_logs_its_plan_and_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oocgemm")
    oocgemm.matmul(A, B, backend="host", tile="2x2x2")
    messages = [record.getMessage() for record in caplog.records if record.name == "oocgemm"]
    assert "tile 2x2x2" in messages[0]
    assert messages[-1].startswith("C is done in ")


def test_the_library_installs_no_handler() -> None:
    code = (
        "import logging, numpy as np, oocgemm\n"
        "oocgemm.matmul(np.ones((2, 2)), np.ones((2, 2)), backend='host')\n"
        "assert [type(h) for h in logging.getLogger('oocgemm').handlers] == [logging.NullHandler]\n"
        "assert logging.getLogger().handlers == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Types as type checkers see them.

RIGHT = """
import numpy as np
import zarr
import oocgemm
from oocgemm import Options

a, b = np.ones((2, 3)), np.ones((3, 4))
stored: zarr.Array = zarr.open_array("x.zarr")
c = oocgemm.matmul(a, b, backend="host", memory="4GiB")
oocgemm.matmul(a, stored, out=stored)
oocgemm.matmul("a.zarr", [[1.0, 2.0]], out="c.npy", overwrite=True)
options: Options = {"alpha": 2.0, "tile": "8x8x8"}
result: oocgemm.Result = oocgemm.gemm(a, b, "c.zarr", **options)
oocgemm.gemm(a, b, trans_a="T", device_memory="2GiB")
oocgemm.plan(a, b, verify=True).run(progress=True)
oocgemm.gemm(plan=oocgemm.plan(a, b), resume=True)
if oocgemm.verify(a, b, c):
    pass
"""
WRONG = """
oocgemm.matmul(a, b, tiles="8x8x8")
oocgemm.matmul(a, b, alpha="2")
oocgemm.matmul(a)
oocgemm.gemm(a, b, trans_a="X")
oocgemm.gemm(a, b, out=c)
oocgemm.plan(a, b, resume=True)
oocgemm.plan(a, b).run(alpha=2.0)
oocgemm.matmul({"x": 1}, b)
"""


@pytest.mark.slow
def test_type_checkers_see_options_and_operands(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RIGHT + WRONG, encoding="utf-8")
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--allow-any-generics",
            f"--cache-dir={tmp_path}",
            program,
        ],
        capture_output=True,
        text=True,
        cwd=Path(oocgemm.__file__).parents[1],
        check=False,
    )
    lines = {int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line}
    first = RIGHT.count("\n") + 2
    assert lines == set(range(first, first + WRONG.count("\n") - 1)), checked.stdout


def test_default_budgets_ignore_small_changes_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "available_memory", lambda *_: 121 << 30)
    before = prepare.budgets_of("cuda", lambda: 78 << 30)
    monkeypatch.setattr(prepare, "available_memory", lambda *_: (121 << 30) - (50 << 20))
    assert prepare.budgets_of("cuda", lambda: (78 << 30) - (20 << 20)) == before
    assert 0.96 * 0.9 * (78 << 30) <= before.device <= 0.9 * (78 << 30)
    assert 0.96 * (60.5 * 2**30) <= before.host <= 60.5 * 2**30


def test_default_budgets_of_two_devices_do_not_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "available_memory", lambda *_: 121 << 30)
    frees = [
        (size << 30) * 10 // 9 + change for change in (-(1 << 20), 1 << 20, -(1 << 20)) for size in (64, 32)
    ]
    found = [prepare.budgets_of("cuda", lambda free=free: free).device for free in frees]  # type: ignore[misc]
    assert len(set(found)) == 2


def test_default_budgets_do_not_alternate_between_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "available_memory", lambda *_: 121 << 30)
    frees = [(64 << 30) * 10 // 9 + change for change in (1 << 20, -(1 << 20)) * 4]
    found = [prepare.budgets_of("cuda", lambda free=free: free).device for free in frees]  # type: ignore[misc]
    assert len(set(found[1:])) == 1
    assert all(size <= free * 9 // 10 for size, free in zip(found, frees, strict=True))
