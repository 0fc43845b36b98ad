"""Products from and to Google Cloud Storage and Azure, as a server in the tests answers for them."""

from collections.abc import Iterator

import numpy as np
import pytest
import zarr
from zarr.storage import ObjectStore

import oocgemm
from oocgemm.errors import ExecutionError
from oocgemm.stores.base import ChangedError
from oocgemm.stores.objects import Bucket
from tests.support.cloud_server import BUCKET, Cloud, cloud
from tests.support.problems import integers
from tests.support.suite import each_value
from tests.support.unfinished_runs import failing_after

pytest.importorskip("obstore")
rng = np.random.default_rng(0)
A, B = integers(rng, (60, 50), "float64"), integers(rng, (50, 70), "float64")
SCHEMES = {"google": "gs", "azure": "az"}


@pytest.fixture(params=SCHEMES)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with cloud(request.param) as (objects, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield objects


def url(server: Cloud, name: str) -> str:
    return f"{SCHEMES[server.kind]}://{BUCKET}/{name}"


def stored(server: Cloud, name: str, values: object, **options: object) -> str:
    place = url(server, name)
    zarr.create_array(ObjectStore(Bucket(place).store), data=values, **options)  # type: ignore[arg-type]
    return place


def found(server: Cloud, name: str) -> object:
    return zarr.open_array(ObjectStore(Bucket(url(server, name)).store), mode="r")[:]


def test_products_of_chunks_and_shards(server: Cloud) -> None:
    a = stored(server, "A", A, chunks=(20, 10), shards=(40, 50))
    b = stored(server, "B", B, chunks=(25, 35), compressors=None)
    oocgemm.gemm(a, b, url(server, "C"), backend="host", tile="32x40x25")
    np.testing.assert_array_equal(found(server, "C"), A @ B)


@each_value
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_a_run_is_resumed(server: Cloud, beta: float) -> None:
    a, b, c = stored(server, "A", A), stored(server, "B", B), url(server, "C")
    if beta:
        stored(server, "C", np.ones((60, 70)), chunks=(20, 35))
    more = {"backend": "host", "tile": "20x35x25", "beta": beta}
    with failing_after(2), pytest.raises(ExecutionError):
        oocgemm.gemm(a, b, c, overwrite=True, **more)  # type: ignore[call-overload]
    result = oocgemm.gemm(a, b, c, resume=True, **more)  # type: ignore[call-overload]
    assert len(result.plan.done) == 2
    np.testing.assert_array_equal(found(server, "C"), A @ B + beta)


def test_objects_change_only_under_their_conditions(server: Cloud) -> None:
    bucket = Bucket(url(server, "x"))
    first = bucket.replace("journal", b"one", None)
    second = bucket.replace("journal", b"two", first)
    for version in (None, first):
        with pytest.raises(ChangedError):
            bucket.replace("journal", b"three", version)
    read = bucket.get("journal")
    assert read is not None
    assert (read[0].tobytes(), read[1]) == (b"two", second)
    assert list(bucket.listing()) == ["journal"]


def test_missing_objects_are_deleted_silently(server: Cloud) -> None:
    bucket = Bucket(url(server, "x"))
    bucket.put("a", np.zeros(3, np.uint8))
    bucket.put("b", np.zeros(3, np.uint8))
    bucket.delete(["missing", "a", "gone", "b"])
    assert bucket.listing() == {}
    assert bucket.get("a") is None
