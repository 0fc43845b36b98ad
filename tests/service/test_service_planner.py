"""The process that plans jobs: it answers as the function does, is confined, and may die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocgemm.errors import BudgetError, InputError
from oocgemm.service import confinement, job_planner
from oocgemm.service.backfill import Limits
from oocgemm.service.job_arguments import arguments, checked
from oocgemm.service.job_planner import Planner, planned
from oocgemm.service.protocol import UnavailableError
from tests.support.services import LIMITS, store_operands

needs_landlock = pytest.mark.skipif(not confinement.abi(), reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    for name in ("data", "secret"):
        (base / name).mkdir()
        store_operands(base / name)
    return base


@pytest.fixture(scope="module")
def planner(base: Path) -> Iterator[Planner]:
    allowed = {"read": [str(base / "data")], "write": []} if confinement.abi() else None
    found = Planner(allowed)
    yield found
    found.close()


def spec(base: Path, folder: str = "data", **options: Any) -> dict[str, Any]:
    paths = {name: str(base / folder / f"{name.upper()}.npy") for name in "abc"}
    return paths | {"options": options}


def test_a_plan_is_that_of_the_function(base: Path, planner: Planner) -> None:
    given = spec(base, tile="16x16x16", alpha="1.5", chunks=[8, 8])
    given["c"] = str(base / "data/C.zarr")
    found = planner.plan(given, LIMITS, "host")
    expected = planned(checked(given), LIMITS, "host")
    assert (found.spec, found.need) == (json.loads(json.dumps(expected.spec)), expected.need)
    assert found.summary["tiles"] == expected.summary["tiles"] == [4, 4]
    assert found.seconds > 0


def test_numbers_that_json_lacks_stay_texts(base: Path, planner: Planner) -> None:
    np.save(base / "data/X.npy", np.ones((8, 8), np.complex64))
    paths = {name: str(base / f"data/{file}.npy") for name, file in (("a", "X"), ("b", "X"), ("c", "Z"))}
    found = planner.plan(paths | {"options": {"alpha": "1+2j", "beta": "0"}}, LIMITS, "host")
    assert found.spec["options"] | {"alpha": "1+2j", "beta": 0.0} == found.spec["options"]
    assert arguments(found.spec)["alpha"] == 1 + 2j


def test_errors_are_those_of_the_function(base: Path, planner: Planner) -> None:
    for given in (spec(base) | {"a": str(base / "data/absent.npy")}, spec(base, tile="x")):
        with pytest.raises(InputError) as right:
            planned(checked(given), LIMITS, "host")
        with pytest.raises(InputError) as found:
            planner.plan(given, LIMITS, "host")
        assert str(found.value) == str(right.value)
    given = spec(base, device_memory=1)
    with pytest.raises(BudgetError) as small:
        planned(checked(given), LIMITS, "host")
    with pytest.raises(BudgetError) as told:
        planner.plan(given, LIMITS, "host")
    assert (str(told.value), told.value.needed) == (str(small.value), small.value.needed)
    assert told.value.needed


@needs_landlock
def test_arrays_outside_the_roots_cannot_be_planned(base: Path, planner: Planner) -> None:
    with pytest.raises(InputError, match="ermission"):
        planner.plan(spec(base, "secret"), LIMITS, "host")


def test_a_defect_is_one_of_the_server(base: Path, planner: Planner) -> None:
    with pytest.raises(RuntimeError, match="see the log"):
        planner.plan(spec(base), Limits({}, "x", 1), "host")  # type: ignore[arg-type]


def test_several_threads_get_their_own_answers(base: Path, planner: Planner) -> None:
    for extent in range(1, 9):
        np.save(base / f"data/{extent}.npy", np.ones((extent, 64)))

    def rows(number: int) -> int:
        given = spec(base) | {"a": str(base / f"data/{1 + number % 8}.npy")}
        return int(planner.plan(given, LIMITS, "host").summary["m"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(rows, range(40))) == [1 + number % 8 for number in range(40)]


def test_a_process_that_dies_or_hangs_is_replaced(
    base: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner.plan(spec(base), LIMITS, "host")
    assert planner._process is not None
    planner._process.kill()
    planner._process.wait()
    with pytest.raises(UnavailableError, match="has died, or did not answer"):
        planner.plan(spec(base), LIMITS, "host")
    assert planner.plan(spec(base), LIMITS, "host").summary["m"] == 64
    pid = planner._process.pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(job_planner, "SECONDS", 0.05)
    with pytest.raises(UnavailableError, match=r"did not answer in 0\.05 s"):
        planner.plan(spec(base), LIMITS, "host")
    monkeypatch.undo()
    assert planner.plan(spec(base), LIMITS, "host").summary["m"] == 64


def test_the_server_opens_no_array_itself() -> None:
    """It does not even import what would."""
    code = (
        "import sys; import oocgemm.service.http.server; "
        "print({'zarr', 'oocgemm.jobs.run'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_plan_says_whether_a_job_goes_on_with_an_old_c(tmp_path: Path) -> None:
    store_operands(tmp_path)
    given = {name: str(tmp_path / f"{name.upper()}.npy") for name in "abc"}
    new = planned(checked(given), LIMITS, "host")
    assert not new.summary["c_exists"]
    shape = new.summary["m"], new.summary["n"]
    np.save(tmp_path / "C.npy", np.zeros(shape, new.summary["c_dtype"]))
    for options, continues in (({}, True), ({"overwrite": True}, False), ({"beta": 1}, False)):
        found = planned(checked(given | {"options": options}), LIMITS, "host")
        assert found.summary["c_exists"] is continues, options


def test_all_passes_and_what_is_computed_between_them_are_admitted(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "X.npy", rng.standard_normal((300, 200)))
    np.save(tmp_path / "Y.npy", np.ones(300))
    np.save(tmp_path / "G.npy", rng.integers(-1, 3, (64, 80)).astype(np.int8))

    def need(**spec: Any) -> tuple[Any, int]:
        given = {name: f"{tmp_path}/{x}" for name, x in spec.items() if isinstance(x, str) and "." in x}
        found = planned(checked(spec | given), LIMITS, "host")
        budgets = found.spec["options"]
        return found, found.need.host - budgets["device_memory"] - budgets["host_memory"]

    _, beside = need(verb="lstsq", x="X.npy", y="Y.npy", out="fit.zarr")
    assert beside >= 12 * 8 * 200**2  # what `lstsq` says that it needs beside the product
    once, beside = need(verb="similarity", e="X.npy", out="nn.zarr", options={"topk": 5})
    assert beside >= 300 * 5 * (8 + 8)
    assert once.need.disk >= 300 * 5 * (8 + 8)
    alone, _ = need(verb="grm", x="G.npy", out="grm.zarr")
    pairs, _ = need(verb="grm", x="G.npy", out="grm.zarr", options={"pairwise": True})
    assert pairs.need.disk == 2 * alone.need.disk == 2 * 64**2 * 4  # the counts are stored, too
    assert pairs.summary["work"] == 2 * alone.summary["work"]
    assert pairs.seconds > alone.seconds
    passes, _ = need(verb="pca", x="X.npy", k=3, out="pca.zarr", options={"tol": 0})
    assert passes.summary["work"] > passes.summary["tiles"][0] * passes.summary["tiles"][1]
    assert passes.need.disk > 8 * 3 * 200
