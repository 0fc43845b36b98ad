"""A result is an array that can be printed and shown in notebooks. A log can be read by its path."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import zarr

import oocgemm
from oocgemm.errors import InputError
from oocgemm.reports import progress as live

A = np.arange(12.0).reshape(3, 4)
B = np.arange(20.0).reshape(4, 5)


@pytest.fixture
def result() -> oocgemm.Result:
    return oocgemm.gemm(A, B, backend="host")


def test_a_result_is_its_array(result: oocgemm.Result) -> None:
    np.testing.assert_array_equal(np.asarray(result), A @ B)
    np.testing.assert_array_equal(result + np.ones((3, 5)), A @ B + 1)


def test_an_array_in_memory_is_copied_only_if_asked(result: oocgemm.Result) -> None:
    assert np.shares_memory(np.asarray(result), result.out)
    assert np.shares_memory(np.asarray(result, copy=False), result.out)
    assert not np.shares_memory(np.array(result), result.out)
    assert not np.shares_memory(np.asarray(result, copy=True), result.out)
    assert np.asarray(result, dtype="float32").dtype == np.float32
    with pytest.raises(ValueError, match="copy"):
        np.asarray(result, dtype="float32", copy=False)


def test_a_zarr_array_is_loaded(tmp_path: Path) -> None:
    made = oocgemm.gemm(A, B, c=tmp_path / "c.zarr", backend="host")
    assert isinstance(made.out, zarr.Array)
    loaded = np.asarray(made)
    assert type(loaded) is np.ndarray
    np.testing.assert_array_equal(loaded, A @ B)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(made, copy=False)


def test_a_memory_map_is_an_array(tmp_path: Path) -> None:
    made = oocgemm.gemm(A, B, c=tmp_path / "c.npy", backend="host")
    np.testing.assert_array_equal(np.asarray(made), A @ B)
    assert np.shares_memory(np.asarray(made), made.out)


def test_a_result_without_an_array_says_so(result: oocgemm.Result) -> None:
    with pytest.raises(InputError, match="has no array"):
        np.asarray(oocgemm.Result(None, result.plan, result.log))


def test_a_result_is_printed_on_a_line(result: oocgemm.Result, tmp_path: Path) -> None:
    stored = oocgemm.gemm(A, B, c=tmp_path / "c.zarr", backend="host")
    for one in (result, stored):
        assert repr(one).startswith("<Result C 3 x 5 float64 in ")
        assert "\n" not in repr(one)
        assert len(repr(one)) < 160 + len(str(tmp_path))


def test_notebooks_show_a_result(result: oocgemm.Result) -> None:
    opened: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: opened.append(tag)  # type: ignore[method-assign]
    parser.feed(result._repr_html_())
    assert set(opened) == {"div", "b", "br"}
    assert "C 3 x 5 float64" in result._repr_html_()
    assert f"-bound, {100 * result.report.verdict.share:.1f}%" in result._repr_html_()


def test_progress_true_shows_the_display(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "LINE_SECONDS", 0.0)
    oocgemm.matmul(A, B, backend="host", progress=False)
    assert capfd.readouterr() == ("", "")
    oocgemm.matmul(A, B, backend="host", progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "tile 1/1  100%" in shown.err


def test_the_library_imports_rich_for_progress_only() -> None:
    code = (
        "import sys, numpy as np, oocgemm; a = np.ones((4, 4)); oocgemm.matmul(a, a, backend='host')\n"
        "assert 'rich' not in sys.modules; oocgemm.matmul(a, a, backend='host', progress=True); assert "
        "'rich' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_report_takes_a_timeline_or_a_path(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    result = oocgemm.gemm(A, B, backend="host", timeline=log)
    assert oocgemm.report(log) == oocgemm.report(str(log)) == oocgemm.report(result.timeline) == result.report
    with pytest.raises(InputError, match="cannot read the timeline"):
        oocgemm.report(tmp_path / "none.jsonl")
    with pytest.raises(TypeError, match="not int"):
        oocgemm.report(3)  # type: ignore[arg-type]
