"""Arrays in object stores are read and written by requests of their own, as many at once as configured."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oocgemm
from oocgemm.errors import ExecutionError, InputError
from oocgemm.stores import object_matrix, open_matrix
from oocgemm.stores.base import ChangedError
from oocgemm.stores.objects import Bucket, redacted, scrubbed
from tests.support.command import command, run
from tests.support.object_runs import TILE, A, B, C, store, stored, url
from tests.support.object_server import DROP, SECRET, TRUNCATE, Fault, Proxy
from tests.support.suite import slow, thinned

LAYOUTS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compressors": "auto"},
    "v2": {"zarr_format": 2},
    "sharded": {"shards": (16, 10), "compressors": "auto"},
    "raw shards": {"shards": (16, 10)},
    "column-major": {"filters": [{"name": "transpose", "configuration": {"order": [1, 0]}}]},
}


@pytest.mark.parametrize("layout", thinned(LAYOUTS, ("raw", "sharded", "column-major")))
def test_blocks_of_all_alignments_are_read(s3: Proxy, layout: str) -> None:
    x = A.copy()
    x[8:16, 5:10] = 0  # a chunk of fill values, which is not stored
    matrix = open_matrix("A", store("A", x, **LAYOUTS[layout]))
    assert matrix.describe()["direct"]
    for rows, cols in (((0, 24), (0, 32)), ((3, 17), (4, 11)), ((8, 16), (5, 10)), ((23, 24), (31, 32))):
        out = np.full((rows[1] - rows[0], cols[1] - cols[0]), np.nan)
        matrix.read(rows, cols, out)
        np.testing.assert_array_equal(out, x[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("compressors", ["auto", None])
def test_small_chunks_of_a_shard_are_read_by_few_requests(s3: Proxy, compressors: str | None) -> None:
    x = np.tile(A, (4, 4))
    place = store("A", x, chunks=(4, 4), shards=(32, 64), compressors=compressors)  # 3 x 2 shards
    c = np.empty((96, 20))
    s3.requests.clear()
    oocgemm.gemm(place, np.tile(B, (4, 1)), c, backend="host", tile="96x20x64")
    np.testing.assert_array_equal(c, x @ np.tile(B, (4, 1)))
    gets = [path for method, path in s3.requests if method == "GET" and "/c/" in path]
    assert len(gets) == 2 * 6  # an index and all chunks of each shard


def test_a_shard_that_is_deleted_during_a_run_is_an_error(s3: Proxy) -> None:
    matrix = open_matrix("A", store("A", A, **LAYOUTS["sharded"]))
    matrix.read((0, 8), (0, 5), np.empty((8, 5)))
    Bucket(url("A")).delete(["c/0/0"])
    with pytest.raises(ExecutionError, match="damaged or truncated: the shard is missing"):
        matrix.read((0, 8), (0, 5), np.empty((8, 5)))


SPANS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)))


@given(SPANS, st.integers(0, 200), st.integers(1, 300))
def test_requests_for_spans_of_a_shard_are_few_and_small(
    pairs: list[tuple[int, int]], gap: int, limit: int
) -> None:
    nothing: Any = ((0, 0), ((0, 0), (0, 0)), np.empty(0))
    spans = sorted((start, start + size) for start, size in pairs)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(object_matrix, "MAX_GAP", gap)
        patches.setattr(object_matrix, "GROUP_BYTES", limit)
        runs = object_matrix.runs([(*span, *nothing) for span in spans])
        found = [[span[:2] for span in one] for one in runs]
    assert [span for one in found for span in one] == spans
    ends = [max(end for _, end in one) for one in found]
    for one, end in zip(found, ends, strict=True):
        assert len(one) == 1 or end - one[0][0] <= limit
    for one, end, after in zip(found, ends, found[1:], strict=False):
        assert after[0][0] > end + gap or max(end, after[0][1]) - one[0][0] > limit


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_codecs_that_only_zarr_knows_are_left_to_zarr(s3: Proxy) -> None:
    from zarr.codecs.numcodecs import Delta

    place = store("A", A, filters=[Delta(dtype="float64")])
    matrix = open_matrix("A", place)
    assert not matrix.describe()["direct"]
    out = np.empty_like(A)
    matrix.read((0, 24), (0, 32), out)
    np.testing.assert_array_equal(out, A)


@pytest.mark.parametrize("given", [("--compressor", "zstd"), *slow(((),))])
def test_a_product_goes_from_objects_to_objects(s3: Proxy, given: tuple[str, ...]) -> None:
    done = run(store("A", A), store("B", B, **LAYOUTS["sharded"]), url("C"), *TILE, *given)
    assert done.code == 0, done.err
    np.testing.assert_array_equal(stored("C"), A @ B)
    assert {"GET", "PUT"} <= {method for method, _ in s3.requests}
    assert run(url("A"), url("B"), url("C"), *TILE).code == 2  # C exists


def test_an_old_c_is_added_to(s3: Proxy) -> None:
    store("C", C)
    done = oocgemm.gemm(store("A", A), store("B", B), url("C"), beta=-2, tile="8x10x16", backend="host")
    assert "oocgemm" not in done.out.attrs
    np.testing.assert_array_equal(stored("C"), A @ B - 2 * C)
    assert not Bucket(url("C")).listing(".oocgemm/redo")


def test_a_sharded_c_is_written_by_whole_shards(s3: Proxy) -> None:
    store("C", C, chunks=(4, 5), shards=(8, 10))
    oocgemm.gemm(store("A", A), store("B", B), url("C"), overwrite=True, tile="8x10x16", backend="host")
    np.testing.assert_array_equal(stored("C"), A @ B)
    with pytest.raises(ExecutionError, match="is sharded"):
        oocgemm.gemm(url("A"), url("B"), url("C"), beta=1, tile="8x10x16", backend="host")


def test_local_workers_read_objects(s3: Proxy, tmp_path: Path) -> None:
    c = str(tmp_path / "C.zarr")
    assert run(store("A", A), store("B", B), c, *TILE, "--workers", "1").code == 0
    out = np.empty_like(C)
    open_matrix("C", c).read((0, 24), (0, 20), out)
    np.testing.assert_array_equal(out, A @ B)


def test_objects_are_read_from_a_web_server_with_a_query(s3: Proxy) -> None:
    store("A", A), store("B", B)
    web = [f"{s3.url}/bucket/{name}.zarr?sig={SECRET}" for name in "AB"]
    c = np.empty_like(C)
    result = oocgemm.gemm(web[0], web[1], c, backend="host")
    np.testing.assert_array_equal(c, A @ B)
    assert SECRET not in repr(result) + str(result.timeline.header)
    done = run(*web, f"{s3.url}/bucket/C.zarr", *TILE)
    assert done.code == 2
    assert "a web server is read-only" in done.err


def test_arrays_in_memory_urls_live_in_the_process() -> None:
    a, b, c = (f"memory://tests/{name}" for name in "abc")
    for place, array in ((a, A), (b, B)):
        oocgemm.gemm(np.eye(len(array)), array, place, backend="host", overwrite=True)
    oocgemm.gemm(a, b, c, backend="host", overwrite=True)
    out = np.empty_like(C)
    open_matrix("C", c).read((0, 24), (0, 20), out)
    np.testing.assert_array_equal(out, A @ B)


@pytest.mark.parametrize(("a", "b"), [(12, 3), *slow((5, 20))])
def test_as_many_requests_are_in_flight_as_configured(s3: Proxy, a: int, b: int) -> None:
    store("A", A, chunks=(4, 4)), store("B", B, chunks=(4, 4))
    c = np.empty((24, 20))
    # Each GET of a chunk waits until `a` GETs of A, or `b` of B, are in flight at once.
    s3.hold = {"A.zarr": a, "B.zarr": b}
    oocgemm.gemm(url("A"), url("B"), c, requests={"A": a, "B": b}, backend="host", tile="24x20x32")
    np.testing.assert_array_equal(c, A @ B)
    assert s3.most == {"A.zarr": a, "B.zarr": b}


def test_results_are_verified_and_reported(s3: Proxy, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    assert run(store("A", A), store("B", B), url("C"), *TILE, "--timeline", log).code == 0
    assert command("verify", url("A"), url("B"), url("C")).code == 0
    report = command("report", log)
    assert (report.code, SECRET in report.out) == (0, False)
    assert SECRET not in log.read_text()
    assert '"requests":64' in log.read_text().replace(" ", "")
    Bucket(url("C")).put("c/0/0", np.zeros(640, np.uint8))
    assert command("verify", url("A"), url("B"), url("C")).code != 0


def test_a_small_host_budget_lowers_the_requests_in_flight(s3: Proxy) -> None:
    plan = oocgemm.plan(store("A", A), store("B", B), url("C"), host_memory="24MiB", backend="host")
    assert 1 <= plan.layouts.a.requests < 64
    assert 1 <= plan.layouts.b.requests < 64
    assert plan.footprint.host_total <= 24 << 20


@pytest.mark.parametrize("text", ["0", "x", "A=0", "D=3", "A=", "2000", "A=1,,B=2"])
def test_invalid_numbers_of_requests_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="pass a number from 1 to 1024"):
        oocgemm.gemm(A, B, np.empty((24, 20)), requests=text)


def failing(kind: Fault, times: int, method: str = "GET") -> Any:
    """Return a fault of the first `times` requests for each chunk."""
    seen: dict[str, int] = {}

    def fault(given: str, path: str) -> Fault | None:
        if given != method or "/c/" not in path:
            return None
        seen[path] = seen.get(path, 0) + 1
        return kind if seen[path] <= times else None

    return fault


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (TRUNCATE, "GET"),
        (503, "PUT"),
        *slow((503, "GET"), (429, "GET"), (DROP, "GET"), (429, "PUT"), (DROP, "PUT"), (TRUNCATE, "PUT")),
    ],
)
def test_requests_that_fail_are_repeated(s3: Proxy, kind: Fault, method: str) -> None:
    store("A", A), store("B", B)
    s3.faults = failing(kind, 2, method)
    oocgemm.gemm(url("A"), url("B"), url("C"), tile="8x10x16", backend="host")
    s3.faults = lambda method, path: None
    np.testing.assert_array_equal(stored("C"), A @ B)


@pytest.mark.parametrize("kind", thinned([503, DROP, TRUNCATE, 403], (503, 403)))
def test_a_server_that_keeps_failing_ends_the_run_which_can_be_resumed(s3: Proxy, kind: Fault) -> None:
    store("A", A), store("B", B)
    s3.faults = lambda method, path: kind if method == "GET" and path.endswith("B.zarr/c/1/3") else None
    done = run(url("A"), url("B"), url("C"), *TILE)
    assert done.code == 1
    assert "bucket/B.zarr/c/1/3" in done.err
    assert ("access is denied" if kind == 403 else "B[8:16, 15:20]") in done.err
    assert SECRET not in done.err
    s3.faults = lambda method, path: None
    assert run(url("A"), url("B"), url("C"), *TILE, "--resume").code == 0
    np.testing.assert_array_equal(stored("C"), A @ B)


def test_damaged_objects_are_errors(s3: Proxy) -> None:
    matrix = open_matrix("A", store("A", A))
    sharded = open_matrix("B", store("B", B, **LAYOUTS["sharded"]))
    Bucket(url("A")).put("c/0/0", np.zeros(17, np.uint8))
    Bucket(url("B")).put("c/0/0", np.zeros(300, np.uint8))
    with pytest.raises(ExecutionError, match=r"0/0 in s3://bucket/A.zarr is damaged .* 17 of 320 bytes"):
        matrix.read((0, 8), (0, 5), np.empty((8, 5)))
    with pytest.raises(ExecutionError, match=r"B.zarr/c/0/0 is a shard whose index cannot be read"):
        sharded.read((0, 8), (0, 5), np.empty((8, 5)))


def test_of_two_conditional_puts_one_succeeds(s3: Proxy) -> None:
    first, second = Bucket(url("C")), Bucket(url("C"))
    version = first.replace("x", b"1", None)
    with pytest.raises(ChangedError):
        second.replace("x", b"2", None)
    newer = second.replace("x", b"3", version)
    with pytest.raises(ChangedError):
        first.replace("x", b"4", version)
    # A PUT that was done, but whose answer was lost, is repeated, and then its condition does not hold.
    lost = [True]
    s3.lose = lambda method, path: method == "PUT" and bool(lost) and lost.pop()
    first.replace("x", b"5", newer)
    found = first.get("x")
    assert found is not None
    assert found[0].tobytes() == b"5"


def test_urls_and_errors_contain_no_credentials() -> None:
    assert redacted("https://me:pw@host:8/a/b.zarr/?sig=x#y") == "https://host:8/a/b.zarr"
    assert redacted("s3://key:secret@bucket/a") == "s3://bucket/a"
    text = f"Error performing GET https://h/x?sig={SECRET} in 1s - 403: <E><Message>No</Message>"
    assert SECRET not in scrubbed(
        f"{text}<StringToSign>{SECRET}</StringToSign></E>\n\nDebug source:\n{SECRET}"
    )
    assert "No" in scrubbed(text)


@pytest.mark.parametrize("place", [f"s3://me:{SECRET}@bucket/A.zarr", f"s3://bucket/A.zarr?key={SECRET}"])
@pytest.mark.parametrize("of", ["A", "C"])
def test_credentials_in_urls_are_refused_and_not_printed(place: str, of: str, tmp_path: Path) -> None:
    done = run(place, "B.zarr", "C.zarr") if of == "A" else run("A.zarr", "B.zarr", place)
    assert done.code == 2
    assert f"{of}: s3://bucket/A.zarr " in done.err
    assert SECRET not in done.out + done.err


def test_errors_name_the_url_and_the_remedy(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    store("A", A)
    done = run(url("A"), url("X"), url("C"))
    assert (done.code, "B: there is no zarr array at s3://bucket/X.zarr" in done.err) == (2, True)
    done = run("s3://none/A.zarr", url("A"), url("C"))
    assert (done.code, "there is no such bucket: create it" in done.err) == (2, True)
    done = run(url("A"), "s3://bucket/B.npy", url("C"))
    assert (done.code, "only zarr arrays are read from URLs" in done.err) == (2, True)
    s3.faults = lambda method, path: 403
    done = run(url("A"), url("A"), url("C"))
    assert (done.code, "access is denied" in done.err and "check the credentials" in done.err) == (2, True)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    done = run(url("A"), url("A"), url("C"))
    assert (done.code, "pip install 'oocgemm[objects]'" in done.err) == (2, True)
