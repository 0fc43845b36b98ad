"""Plans price requests to object stores by latency and bandwidth, apart from local files."""

from dataclasses import replace

import pytest

from oocgemm.planning import (
    Budgets,
    Chunked,
    Layout,
    Layouts,
    Remote,
    Setting,
    Writing,
    default_model,
)
from oocgemm.planning.cost.price import Prices
from oocgemm.planning.layout import request_bytes
from tests.support.products import product_of

HOST = default_model("host", 4)

CHUNKED = Chunked((256, 256), partial_reads=False, writing=Writing((256, 256)))
REMOTE = Remote(
    requests=64,
    request_bytes=1 << 20,
    read_chunk=(256, 256),
    partial_reads=False,
    writing=Writing((256, 256)),
)
PROBLEM = product_of(4096, 4096, 4096, "float64", "float64", "float64", "float64")


def prices(a: Layout, b: Layout, c: Layout = CHUNKED) -> Prices:
    return Prices(Setting(PROBLEM, HOST, Layouts(a, b, c), Budgets(1 << 30, 1 << 30)))


def test_a_remote_operand_does_not_slow_the_prices_of_a_local_one() -> None:
    local, mixed = prices(CHUNKED, CHUNKED), prices(REMOTE, CHUNKED)
    assert mixed.rate("read", "B", 1024, 1024) == local.rate("read", "B", 1024, 1024)
    assert mixed.rate("read", "A", 1024, 1024) < local.rate("read", "A", 1024, 1024)


def test_the_rate_follows_from_latency_and_requests_until_the_bandwidth_limits_it() -> None:
    size = 256 * 256 * 8
    one = size / (HOST.request_latency + size / HOST.connection)
    for requests in (1, 2, 16, 64, 1024):
        found = replace(REMOTE, requests=requests).read_rate(HOST, (4096, 4096))
        assert found == pytest.approx(min(requests * one, HOST.remote))
    # A panel of one chunk cannot have more requests in flight than panels are read at once.
    assert REMOTE.read_rate(HOST, (256, 256)) == pytest.approx(min(8 * one, HOST.remote))


def test_writes_to_an_object_store_have_their_own_rate() -> None:
    local, remote = prices(CHUNKED, CHUNKED), prices(CHUNKED, CHUNKED, REMOTE)
    assert remote.rate("write", "C", 256, 256) < local.rate("write", "C", 256, 256)
    new = Remote(requests=64, request_bytes=1 << 20, writing=Writing(free=True))
    assert prices(CHUNKED, CHUNKED, new).rate("write", "C", 4096, 4096) > 1e6


@pytest.mark.parametrize("host", [1 << 20, 64 << 20, 1 << 30, 1 << 40])
def test_buffers_of_requests_take_at_most_a_quarter_of_the_host_budget(host: int) -> None:
    layouts = Layouts(REMOTE, CHUNKED, REMOTE).with_requests({"A": 512}, host, reads_c=True)
    assert layouts.a.requests <= 512
    assert layouts.b == CHUNKED
    assert layouts.c.requests <= 64
    taken = request_bytes(layouts.by_operand, reads_c=True)
    assert taken <= host // 4 or layouts.a.requests == layouts.c.requests == 1
    assert (layouts.a.requests, layouts.c.requests) == (512, 64) or host < 1 << 40
