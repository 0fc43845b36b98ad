"""Workers transform operands, and run epilogues, as one process does, with numbers that are found once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm import Add, Cast, Correlation, Divide, Gaussian, RankOne, Scale, Transform
from oocgemm.distributed.tasks import Given
from oocgemm.jobs.request import Destination, Reduction, Request
from oocgemm.jobs.stats import Findings, Stats, keeping, squares, stats_of
from oocgemm.stores import open_matrix
from tests.support.small_runs import EXTENT, content_of, prepare
from tests.support.suite import slow

U, V = np.linspace(-1, 1, EXTENT), np.linspace(2, 3, EXTENT)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {
            "epilogue": [Scale(rows=U, value=0.5), Add("old.zarr", value=2.0), RankOne(U, V)],
            "transform_a": Transform(center="k", scale="k", log1p=False),
        },
        *slow(
            ({"epilogue": [Divide("old.zarr")], "verify": True},),
            ({"epilogue": [Correlation(), Cast("float32")], "verify": True},),
            ({"epilogue": [Gaussian(0.01)]},),
            ({"transform_a": Transform(center=U), "transform_b": Transform(scale=V), "verify": True},),
            ({"transform_b": Transform(center="k", cast="float32"), "epilogue": [Correlation()]},),
        ),
    ],
)
def test_steps_give_the_bits_of_one_process(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(here)  # D may be at a relative path
    if "transform_a" in options or "transform_b" in options:
        options = {"transform_a": None, "transform_b": Transform(cast="float64"), **options}
        if options["transform_b"].cast == "float32":
            options["transform_a"] = Transform(cast="float32")
    assert content_of(here, **options) == content_of(here, workers=2, **options)


def test_means_are_found_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers subtract the means that they are given. These are wrong here, as the result shows."""
    given, a = Given.of, np.asarray(zarr.open_array(here / "A.zarr")[:])

    def wrong(request: Request, findings: Findings, nonce: str = "") -> Given:
        for key in findings:
            findings[key] = replace(findings[key], mean=np.ones(EXTENT))
        return given(request, findings, nonce)

    def center(**options: Any) -> Any:
        content = content_of(here, transform_a=Transform(center="k"), **options)
        return np.frombuffer(content).reshape(EXTENT, EXTENT)

    right = center(workers=1)
    b = np.asarray(zarr.open_array(here / "B.zarr")[:])
    np.testing.assert_allclose(right, (a - a.mean(axis=0)) @ b, atol=1e-9)
    monkeypatch.setattr("oocgemm.jobs.resume._differences", lambda then, now: [])
    monkeypatch.setattr("oocgemm.distributed.distribute.Given.of", wrong)
    with pytest.raises(oocgemm.OocGemmError, match="the transform of A is"):
        center(workers=1)


def test_a_pass_is_made_once(here: Path) -> None:
    x, found = open_matrix("A", here / "A.zarr"), dict[str, Any]()
    with keeping(found):
        first = squares(x, 1, 1 << 20)
        first[:] = 0  # the caller may change what it gets
        again = squares(x, 1, 1 << 30)
    assert (again > 0).all()
    assert len(found) == 1
    with keeping({key: value + 1 for key, value in found.items()}):
        assert np.array_equal(squares(x, 1, 1 << 20), again + 1)
        assert not np.array_equal(squares(x, 0, 1 << 20), again + 1)


def test_what_is_given_survives_packing(here: Path) -> None:
    x = open_matrix("A", here / "A.zarr")
    stats = stats_of(x, 0, Transform(), 1 << 20)
    half: Any = np.float32(0.5)
    request = Request.of(
        "/a", "https://b/c", Destination.parse("/c"), alpha=1 + 2j, trans_a="T", requests={"A": 3}, workers=4,
        transform_a=Transform(missing=float("nan"), center=U), out_dtype=np.dtype("float32"),
        epilogue=(Scale(rows=[1, 2], value=half), Add("/d")), tile="8x8x8", memory="1GiB",
    )  # fmt: skip
    reduction = Reduction(("A", "B"), True, factor=V[:, None])
    (here / "given").write_bytes(Given.of(request, {"s": stats, "r": reduction}, "nonce").packed())
    found = Given.unpacked(here / "given")
    assert (found.nonce, found.request.c, found.request.budgets) == ("nonce", request.c, request.budgets)
    assert (found.request.alpha, found.request.out_dtype, found.request.tile) == (1 + 2j, "float32", None)
    assert str(found.request.a.transform) == str(request.a.transform)
    assert found.request.epilogue[0].rows == (1, 2)  # type: ignore[union-attr]
    assert np.array_equal(found.findings["r"].factor, V[:, None])
    kept: Stats = found.findings["s"]
    assert np.array_equal(kept.mean, stats.mean)


def test_only_values_of_the_package_are_rebuilt(here: Path) -> None:
    text = b'{"class": "subprocess:Popen", "fields": {"args": ["true"]}}'
    np.savez(here / "given.npz", np.frombuffer(text, np.uint8))
    with pytest.raises(ValueError, match="no class of oocgemm"):
        Given.unpacked(here / "given.npz")


def test_d_in_memory_is_refused(here: Path) -> None:
    call: Callable[..., Any] = oocgemm.gemm
    with pytest.raises(oocgemm.CombinationError, match="D is a ndarray, which other processes cannot read"):
        call(here / "A.zarr", here / "B.zarr", here / "C.zarr", epilogue=[Add(np.eye(EXTENT))], workers=1)
