"""`memory` bounds the host memory of every verb, on every backend, beside a budget of device memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import oocgemm
from oocgemm import BudgetError, InputError
from oocgemm.distributed.survey import WorkerFacts, with_shares
from oocgemm.jobs import prepare
from oocgemm.jobs.prepare import within_budgets
from oocgemm.jobs.request import Destination, Request
from oocgemm.planning import Plan
from oocgemm.planning.units import parse_size
from oocgemm.service import job_planner
from oocgemm.service.backfill import Limits
from oocgemm.service.job_arguments import checked
from tests.support.backends_here import running_on
from tests.support.command import command
from tests.support.suite import each_value

MIB = 1 << 20
HOST = 96 * MIB
rng = np.random.default_rng(0)
X = rng.integers(-3, 4, (90, 70)).astype(np.float64)


@contextmanager
def planned() -> Iterator[list[Plan]]:
    """Collect the plans of all products that are run or planned in the block."""
    found = list[Plan]()

    def recorded(*arguments: Any, **options: Any) -> Plan:
        found.append(within_budgets(*arguments, **options))
        return found[-1]

    with patch.object(prepare, "within_budgets", recorded):
        yield found


VERBS: dict[str, Callable[..., Any]] = {
    "gemm": lambda x, **o: oocgemm.gemm(x, x, trans_b="T", **o),
    "matmul": lambda x, **o: oocgemm.matmul(x.T, x, **o),
    "gram": oocgemm.gram,
    "corr": oocgemm.corr,
    "cov": oocgemm.cov,
    "similarity": lambda x, **o: oocgemm.similarity(x, topk=3, **o),
    "threshold": lambda x, **o: oocgemm.similarity(x, threshold=0.1, **o),
    "pca": lambda x, **o: oocgemm.pca(x, 3, iterations=1, **o),
    "lstsq": lambda x, **o: oocgemm.lstsq(x, x[:, 0] ** 2, **o),
    "ridge": lambda x, **o: oocgemm.ridge(x, x[:, 0], [1, 2], intercept=True, **o),
    "svd": lambda x, **o: oocgemm.svd(x, 3, u=True, **o),
    "kernel_matmul": lambda x, **o: oocgemm.kernel_matmul(x, np.ones(90), gamma=0.1, **o),
    "grm": lambda x, **o: oocgemm.grm(np.abs(x).clip(0, 2), **o),
    "reduce": lambda x, **o: oocgemm.reduce(x, x, to=oocgemm.Reduce("sum"), trans_b="T", **o),
}


@each_value
@pytest.mark.filterwarnings("ignore::oocgemm.DataWarning")  # one iteration is few
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("backend", ["host", "fake-cuda"])
def test_memory_bounds_the_host_memory_of_every_verb(verb: str, backend: str) -> None:
    with planned() as plans, running_on(backend) as options:
        VERBS[verb](X, memory=HOST, **options)
    assert plans
    for plan in plans:
        device = plan.budgets.device
        if backend == "host":
            assert device + plan.budgets.host == HOST
        else:
            assert (plan.budgets.host, device > HOST) == (HOST, True)
        assert plan.footprint.host_total + plan.machine.unified * plan.footprint.device_total <= HOST


COMMANDS = {
    "run": ("x.npy", "x.npy", "c.npy", "--transpose-b"),
    "plan": ("x.npy", "x.npy", "--transpose-b"),
    "gram": ("x.npy", "c.npy"),
    "grm": ("x.npy", "c.npy"),
    "corr": ("x.npy", "c.npy"),
    "cov": ("x.npy", "c.npy"),
    "similarity": ("x.npy", "c.zarr", "--topk", "3"),
    "pca": ("x.npy", "c.zarr", "--components", "3", "--iterations", "1"),
}
GIVEN = ("--device-memory", "512MiB")


@pytest.mark.parametrize(("verb", "device"), [("run", ()), *((verb, GIVEN) for verb in COMMANDS)])
def test_memory_bounds_the_host_memory_of_every_command(
    verb: str, device: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.abs(X).clip(0, 2))
    with planned() as plans, running_on("fake-cuda") as options:
        given = "--memory", str(HOST), "--backend", "cuda", "--kernel", options["kernel"], *device
        done = command(verb, *COMMANDS[verb], *given)
    assert done.code == 0, done.err
    assert plans
    for plan in plans:
        assert plan.budgets.host == HOST
        assert plan.budgets.device == 512 * MIB if device else plan.budgets.device > HOST


def test_a_plan_for_cuda_takes_memory_beside_device_memory() -> None:
    options: dict[str, Any] = {"backend": "cuda", "memory": "96MiB", "device_memory": "512MiB"}
    for plan in (
        oocgemm.plan(X, X.T, **options),
        oocgemm.plan_gram(X, **options),
        oocgemm.plan_pca(X, 3, **options).pass_plan,
    ):
        assert (plan.budgets.host, plan.budgets.device) == (HOST, 512 * MIB)
    # What has no default without a device is asked for, in words that can be followed.
    with pytest.raises(InputError, match="device_memory='16GiB'"):
        oocgemm.plan(X, X.T, backend="cuda", memory="96MiB")
    oocgemm.plan(X, X.T, backend="cuda", memory="96MiB", device_memory="16GiB")


def test_two_names_of_one_bound_exclude_each_other() -> None:
    for backend in ("host", "cuda"):
        with pytest.raises(InputError, match="drop one of them"):
            oocgemm.plan(X, X.T, backend=backend, memory="1GiB", host_memory="1GiB")


@pytest.mark.parametrize("short", [{"memory": "1KiB"}, {"device_memory": "1KiB"}, {}])
def test_an_error_on_a_gpu_names_memory_if_that_was_given(short: dict[str, str]) -> None:
    options: dict[str, Any] = {"backend": "cuda", "memory": "1KiB", "device_memory": "1KiB"}
    options |= dict.fromkeys(options.keys() - {"backend", *short}, "1GiB") if short else {}
    with pytest.raises(BudgetError) as raised:
        oocgemm.plan(X, X.T, **options)
    assert "host_memory" not in str(raised.value)
    assert {*raised.value.named} == ({*short} or {"memory", "device_memory"})
    oocgemm.plan(X, X.T, **options | dict(raised.value.named))


def found(backend: str, number: int) -> WorkerFacts:
    return WorkerFacts(
        *(f"w{number}", "here", "here", (0,), backend, "auto", "", {}, f"gpu{number}"),
        free=8 * HOST,
        available=8 * HOST,
        multiprocessors=1,
    )


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_workers_share_memory_on_every_backend(backend: str) -> None:
    request = Request.of(X, X, Destination.parse(None), memory=HOST)
    shared = with_shares(request, [found(backend, 1), found(backend, 2)])
    assert (shared.budgets.memory, shared.budgets.host_memory) == (HOST // 2, None)
    assert (shared.budgets.device_memory is not None) == (backend == "cuda")


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_jobs_of_the_service_take_memory(backend: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((64, 64)))
    paths = {name: str(tmp_path / f"{name}.npy") for name in "abc"} | {"b": str(tmp_path / "a.npy")}
    limits = Limits({0: 512 * MIB} if backend == "cuda" else {}, 512 * MIB, 1 << 30)
    job = job_planner.planned(checked(paths | {"options": {"memory": "96MiB"}}), limits, backend)
    options = job.spec["options"]
    assert "memory" not in options
    host = parse_size(options["host_memory"])
    assert host + (parse_size(options["device_memory"]) if backend == "host" else 0) <= HOST
    assert job.need.host <= HOST
    oocgemm.plan(paths["a"], paths["b"], **options)
