"""Requests that plan jobs wait for a thread of their own, in turn, and delay no other request."""

import asyncio
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from oocgemm.service.http.service import MAX_PLANS_OF_USER, Plans
from tests.support.real_server import JOB, RealServer, running_server

BODY = json.dumps(JOB | {"c": "out:C.npy"})
DRY_RUN = ("POST", "/v1/jobs?dry_run=1", BODY, {"Content-Type": "application/json"})


@contextmanager
def _stopped_planner(server: RealServer) -> Iterator[int]:
    """Let no plan be made for the block; yield the id of the process that plans."""
    assert server.ask(*DRY_RUN[:2], JOB | {"c": "out:C.npy"}).status == 200  # it has started then
    children = Path(f"/proc/{server.pid}/task")
    found = {int(pid) for each in children.iterdir() for pid in (each / "children").read_text().split()}
    (planner,) = (pid for pid in found if b"planner" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(planner, signal.SIGSTOP)
    try:
        yield planner
    finally:
        with suppress(ProcessLookupError):
            os.kill(planner, signal.SIGCONT)


@contextmanager
def _sent(
    server: RealServer, count: int, token: str | None = None
) -> Iterator[list[http.client.HTTPConnection]]:
    """Send dry runs, without waiting for the answers. Yield their connections, and close them at the end."""
    method, path, body, headers = DRY_RUN
    with ExitStack() as stack:
        sent = [stack.enter_context(closing(server.connect(tcp=token is not None))) for _ in range(count)]
        for connection in sent:
            identity = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, body, headers | identity)
        yield sent


def _answers(sent: list[http.client.HTTPConnection], count: int) -> list[http.client.HTTPResponse]:
    """Wait until so many requests have been answered; return the answers."""
    answered = select.poll()
    for connection in sent:
        answered.register(connection.sock, select.POLLIN)
    end = time.monotonic() + 20
    while len(ready := {number for number, _ in answered.poll(100)}) < count and time.monotonic() < end:
        time.sleep(0.05)
    assert len(ready) == count
    return [connection.getresponse() for connection in sent if connection.sock.fileno() in ready]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [MAX_PLANS_OF_USER + 20, pytest.param(800, marks=pytest.mark.slow)])
def test_dry_runs_do_not_delay_the_queue(tmp_path: Path, count: int) -> None:
    with running_server(tmp_path) as server, _stopped_planner(server), _sent(server, count) as sent:
        times = []
        for _ in range(5):
            begun = time.monotonic()
            assert server.ask("GET", "/v1/queue").status == 200
            times.append(time.monotonic() - begun)
        # All but a few are answered, though no plan is made.
        for reply in _answers(sent, count - MAX_PLANS_OF_USER):
            assert (reply.status, reply.getheader("Retry-After")) == (503, "1")
            assert b"wait for their plans" in reply.read()
        assert sorted(times)[2] < 0.5, times


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_user_whose_requests_wait_keeps_no_other_user_out(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        one, other = server.token(name="one"), server.token(name="other")
        with ExitStack() as stack:
            with _stopped_planner(server):
                greedy = stack.enter_context(_sent(server, 2 * MAX_PLANS_OF_USER, one))
                assert {reply.status for reply in _answers(greedy, MAX_PLANS_OF_USER)} == {503}
                (last,) = stack.enter_context(_sent(server, 1, other))
            assert last.getresponse().status == 200


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_request_whose_client_has_gone_is_dropped(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, _stopped_planner(server):
        with _sent(server, MAX_PLANS_OF_USER):
            time.sleep(0.5)
        time.sleep(0.5)
        # None of them waits any longer, so there is room for as many.
        with _sent(server, MAX_PLANS_OF_USER + 1) as sent:
            assert [reply.status for reply in _answers(sent, 1)] == [503]


def test_users_get_turns_one_after_the_other() -> None:
    order, free = list[str](), threading.Event()

    def take(user: str) -> None:
        free.wait(10)
        order.append(user)

    async def main() -> None:
        plans = Plans()
        users = ("first", *("greedy",) * 6, "modest", "modest", "late")
        tasks = [asyncio.create_task(plans.turn(user, partial(take, user))) for user in users]
        await asyncio.sleep(0.05)
        assert order == []
        free.set()
        await asyncio.gather(*tasks)
        plans.close()

    asyncio.run(main())
    assert order == ["first", "greedy", "modest", "late", "greedy", "modest", *("greedy",) * 4]


@pytest.mark.parametrize("late", [False, True])
def test_a_turn_that_is_cancelled_goes_to_the_next(late: bool) -> None:
    free = threading.Event()

    async def main() -> None:
        plans = Plans()
        first = asyncio.create_task(plans.turn("one", partial(free.wait, 10)))
        waiting = [asyncio.create_task(plans.turn("other", lambda: "taken")) for _ in range(2)]
        await asyncio.sleep(0.05)
        if late:  # when it has been called, and before it goes on
            plans._call()
        waiting[0].cancel()
        if not late:
            first.cancel()  # its thread goes on, and no other one begins
            await asyncio.sleep(0.05)
            assert not waiting[1].done()
        free.set()
        assert await asyncio.wait_for(waiting[1], 10) == "taken"
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        plans.close()

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_a_planner_that_waits_for_an_array_ends_with_its_server() -> None:
    script = (
        "import time\nfrom oocgemm.service import job_planner\n"
        "def _answer(request):\n    print('planning', flush=True)\n    time.sleep(600)\n"
        "job_planner._answer = _answer\njob_planner.main(None)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        assert process.stderr.readline() == b"planning\n"
        try:
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()
