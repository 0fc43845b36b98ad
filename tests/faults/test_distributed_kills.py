"""Workers, child processes and coordinators are killed at random instants. C has the same bits."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.clusters import (
    all_ended,
    children,
    cluster,
    content,
    environment,
    fresh,
    processes,
    store_operands,
)

pytest.importorskip("distributed")

EXTENT, TILE = 768, "64x64x64"
# Kills of one coordinator's workers and children, at most. A part may then not fail three times in a row.
KILLS_PER_RUN = 4


class Victims:
    """Kills processes of one product at random, and resumes the product until it is complete."""

    def __init__(self, folder: Path, where: Sequence[str], rng: random.Random) -> None:
        self.folder, self.where, self.rng = folder, where, rng
        self.kills: Counter[str] = Counter()

    def start(self, c: Path, beta: str) -> "subprocess.Popen[str]":
        line = [
            sys.executable,
            "-m",
            "oocgemm",
            "run",
            *map(str, (self.folder / "A.zarr", self.folder / "B.zarr", c)),
        ]
        line += [
            "--beta",
            beta,
            "--tile",
            TILE,
            "--memory",
            "600MiB",
            "--backend",
            "host",
            "--quiet",
            "--resume",
        ]
        return subprocess.Popen(
            [*line, *self.where],
            cwd=self.folder,
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: "subprocess.Popen[str]") -> bool:
        """Wait for a coordinator. Return whether C is complete. Only kills may have made it fail."""
        out, err = process.communicate(timeout=120)
        killed = any(text in err for text in ("SIGKILL", "no worker", "failed 3 times"))
        assert process.returncode in (0, -9) or killed, err
        assert out == ""
        return process.returncode == 0

    def once(self, c: Path, beta: str, wanted: int) -> None:
        """Compute a product from the beginning, with up to `wanted` kills."""
        fresh(self.folder, c, old=beta != "0")
        left = wanted
        while True:
            process = self.start(c, beta)
            for _ in range(KILLS_PER_RUN):
                if left and self.strike(process):
                    left -= 1
                if process.poll() is not None:
                    break
            complete = self.finish(process)
            assert all_ended(self.folder)
            if complete:
                return

    def begun(self) -> bool:
        """Tell whether a child process computes a part, or, now and then, whether there is any."""
        found = children(self.folder)
        return bool(found) and (
            self.rng.random() < 0.01 or any(self.folder.glob("C.*/**/attempts/*/journal"))
        )

    def strike(self, coordinator: "subprocess.Popen[str]") -> bool:
        """Wait until a part has been begun, then for a random time, and kill a random process."""
        until = time.monotonic() + 60
        while not self.begun() and coordinator.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(self.rng.uniform(0, 1.5))
        kinds = ["child", "coordinator"] + (["worker"] if "--scheduler-file" in self.where else [])
        kind = self.rng.choice(kinds)
        if kind == "coordinator":
            found = [psutil.Process(coordinator.pid)] if coordinator.poll() is None else []
        elif kind == "child":
            found = children(self.folder)
        else:  # processes that nannies have started
            found = processes(self.folder, "multiprocessing", "spawn_main")
        if not found:
            return False
        try:
            self.rng.choice(found).kill()
        except psutil.NoSuchProcess:
            return False
        self.kills[kind] += 1
        return True


# `test_distributed_faults` has one kill of each kind of process, at a known moment.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_local_runs_survive_kills(tmp_path: Path) -> None:
    torture(tmp_path, ("--workers", "2"), 33, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_on_a_cluster_survive_kills(tmp_path: Path) -> None:
    with cluster(tmp_path, 2) as file:
        torture(tmp_path, ("--scheduler-file", str(file)), 67, seed=2)


def torture(folder: Path, where: Sequence[str], kills: int, seed: int) -> None:
    """Compute products until there were this many kills. Compare each with an undisturbed one."""
    store_operands(folder, EXTENT)
    rng = random.Random(seed)
    victims = Victims(folder, where, rng)
    cases = [("C.zarr", "0"), ("C.zarr", "1"), ("C.npy", "0"), ("C.npy", "1")]
    right: dict[tuple[str, str], bytes] = {}
    number = 0
    while (left := kills - victims.kills.total()) > 0:
        name, beta = case = cases[number % len(cases)]
        number += 1
        c = folder / name
        if case not in right:
            fresh(folder, c, old=beta != "0")
            assert victims.finish(victims.start(c, beta))
            right[case] = content(c)
        victims.once(c, beta, min(left, 8))
        assert content(c) == right[case], case
    print(dict(victims.kills), number)
