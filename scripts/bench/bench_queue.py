#!/usr/bin/env python
"""Measure how long a submission to `oocgemm serve` takes while many jobs are queued.

    python scripts/bench/bench_queue.py --queued 10000 --submissions 1000 --output results.json

The server drains, so that the queue does not become shorter. Its jobs are small products of one pair of
operands, each with its own C. They are submitted in batches of 1000. Then single jobs are submitted by one
client on one connection, before and after the queue has been filled. A time is that from the request to its
answer, at the client. At the end, one job runs alone. The overhead of the service is the time from its
submission to its end, as the server records them, without the T of its run.
"""

import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from keeping import keep, output, work

BATCH, EXTENT = 1000, 64


class Connection(http.client.HTTPConnection):
    """A connection to a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = str(path)

    def connect(self) -> None:
        """Open the connection."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request; return its answer."""
        sent = None if body is None else json.dumps(body)
        self.request(method, path, sent, {"Content-Type": "application/json"})
        reply = self.getresponse()
        found = json.loads(reply.read())
        if reply.status >= 400:
            raise click.ClickException(found["detail"])
        return found


@contextmanager
def server(folder: Path) -> Iterator[Connection]:
    """Run a server; yield a connection to it."""
    rng = np.random.default_rng(1)
    for name in ("data", "out"):
        (folder / name).mkdir()
    for name in "AB":
        np.save(folder / f"data/{name}.npy", rng.integers(-4, 5, (EXTENT, EXTENT)).astype(float))
    roots = ["--root", f"data={folder / 'data'}:ro", "--root", f"out={folder / 'out'}:rw"]
    serve = [sys.executable, "-m", "oocgemm", "serve", "--backend", "host"]
    command = [*serve, "--state", str(folder / "state"), *roots]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not any(line.startswith("listening on") for line in process.stdout):
            raise click.ClickException("the server did not start")
        connection = Connection(folder / "state/serve.sock")
        try:
            yield connection
        finally:
            connection.close()
            process.send_signal(signal.SIGTERM)


def job(name: str) -> dict[str, str]:
    """Return the product that is stored under a name."""
    return {"a": "data:A.npy", "b": "data:B.npy", "c": f"out:{name}.npy"}


def submissions(connection: Connection, name: str, count: int) -> dict[str, float]:
    """Submit single jobs; return figures of their times, in milliseconds."""
    times = []
    for number in range(count):
        begun = time.perf_counter()
        connection.ask("POST", "/v1/jobs", job(f"{name}{number}"))
        times.append((time.perf_counter() - begun) * 1e3)
    found = statistics.quantiles(times, n=100)
    return {"count": count, "p50_ms": found[49], "p99_ms": found[98], "max_ms": max(times)}


@click.command()
@click.option("--queued", default=10_000, show_default=True, help="Jobs in the queue.")
@click.option("--submissions", "count", default=1000, show_default=True, help="Single jobs that are timed.")
@work
@output
def main(queued: int, count: int, work: Path | None, output: Path | None) -> None:
    """Measure how long a submission takes while many jobs are queued."""
    with tempfile.TemporaryDirectory(dir=work) as folder, server(Path(folder)) as connection:
        alone = connection.ask("POST", "/v1/jobs", job("alone"))
        while (alone := connection.ask("GET", f"/v1/jobs/{alone['id']}"))["ended"] is None:
            time.sleep(0.1)
        connection.ask("POST", "/v1/drain", {"draining": True})
        results: dict[str, Any] = {"empty": submissions(connection, "few", count)}
        begun = time.perf_counter()
        for first in range(0, queued, BATCH):
            jobs = [job(f"queued{number}") for number in range(first, min(first + BATCH, queued))]
            connection.ask("POST", "/v1/batches", {"jobs": jobs})
        results |= {"queued": queued, "fill_s": time.perf_counter() - begun}
        results["full"] = submissions(connection, "many", count)
    results["overhead_s"] = alone["ended"] - alone["created"] - alone["result"]["seconds"]
    click.echo(json.dumps(results, indent=2))
    keep(output, "queue", results)


if __name__ == "__main__":
    main()
