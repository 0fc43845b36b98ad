"""The processes of `oocgemm serve` and of its confined jobs are killed, while clients wait over HTTP."""

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from oocgemm.service import dispatcher
from oocgemm.service.client import Job
from oocgemm.service.job_worker import TILES
from oocgemm.service.protocol import State
from tests.support.real_server import RealServer, running_server

TILE_COUNT = 16


def kill_a_job(server: RealServer, rng: random.Random) -> bool:
    """Kill the process of a random job that runs. Return False if there is none."""
    alive = [folder for folder in (server.state / "jobs").glob("*") if dispatcher.is_alive(folder)]
    process = dispatcher.attach(rng.choice(alive)) if alive else None
    if process is None:
        return False
    found = not process.ended
    process.send(signal.SIGKILL)
    process.close()
    return found


@pytest.mark.timeout(900)
# `test_http_faults` has one kill of each process, at a known moment.
@pytest.mark.slow
@pytest.mark.parametrize(("count", "kills"), [(4, 1), (40, 6)])
def test_clients_get_every_product_if_servers_and_jobs_are_killed(
    tmp_path: Path, count: int, kills: int
) -> None:
    rng = random.Random(count)
    quickly = {"oocgemm.service.dispatcher:RETRY": 0.05, "oocgemm.service.dispatcher:RETRY_FACTOR": 1.0}
    with running_server(tmp_path, "--share-device", "--host-memory", "200MiB", set=quickly) as server:
        products = [("data:A.npy", "data:B.npy", f"out:C{number}.npy") for number in range(count)]
        jobs = server.client().map(products, tile="16x16x16")
        for job in jobs:  # the client has no such argument
            server.ask("PATCH", f"/v1/jobs/{job.id}", {"max_attempts": 100})
        waiting = [threading.Thread(target=Job.wait, args=(job, 800)) for job in jobs]
        for thread in waiting:
            thread.start()
        killed: Counter[str] = Counter()
        end = time.monotonic() + 800
        while (killed["server"] < kills or killed["job"] < kills) and time.monotonic() < end:
            time.sleep(rng.uniform(0, 0.3))
            if killed["server"] < kills and (killed["job"] >= kills or rng.random() < 0.5):
                server.restart(signal.SIGKILL)
                killed["server"] += 1
            elif kill_a_job(server, rng):
                killed["job"] += 1
            elif all(server.job(job.id)["ended"] for job in jobs):  # too fast for the last kills
                break
        for thread in waiting:
            thread.join()
        server.check(*(f"C{number}.npy" for number in range(count)))
        for job in jobs:
            assert job.refresh().state == State.SUCCEEDED
            lines = (server.state / "jobs" / job.id / TILES).read_text().splitlines()
            last = [line for line in lines if line.startswith(f"{job.info['result']['attempt']} ")]
            assert len(last) == len({*last}) == TILE_COUNT - job.info["result"]["kept_tiles"]
        assert killed["server"] == kills
        print(count, dict(killed))
