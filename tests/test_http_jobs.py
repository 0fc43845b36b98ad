"""Jobs over HTTP, from their submission to their end, with the real server."""

from collections.abc import Iterator

import pytest

from tests.real_server import RealServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def test_a_product_is_computed(server: RealServer) -> None:
    job = server.submit("first.npy", name="first", options={"tile": "16x16x16"})
    ended = server.until(job["id"], "succeeded", "failed")
    assert (ended["state"], ended["exit_code"], ended["progress"]) == (
        "succeeded",
        0,
        {"done": 16, "total": 16},
    )
    server.check("first.npy")
