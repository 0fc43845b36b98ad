"""The backends that tests run on.

The host and a fake CUDA device are everywhere. Tests on cuda run if a device is present, and are marked gpu.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from oocgemm import backends
from oocgemm.errors import BackendError
from oocgemm.machine import info as rates
from oocgemm.planning import MachineModel, default_model
from tests.support.fake_cuda import fake_cuda


def _cuda_answers() -> bool:
    try:
        backends.open_backend("cuda")
    except BackendError:
        return False
    return True


CUDA = _cuda_answers()

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device answers")]

Engine = tuple[str, str]  # a backend that `running_on` accepts, and a kernel

REAL_BACKENDS = [pytest.param("host"), pytest.param("cuda", marks=needs_gpu)]
BACKENDS = [*REAL_BACKENDS, pytest.param("fake-cuda")]
REAL_ENGINES = [
    pytest.param(("host", "auto"), id="host"),
    pytest.param(("host-staged", "auto"), id="host-staged"),
    pytest.param(("cuda", "cublas"), id="cublas", marks=needs_gpu),
    pytest.param(("cuda", "tiled"), id="tiled", marks=needs_gpu),
]
ENGINES = [*REAL_ENGINES, pytest.param(("fake-cuda", "cublas"), id="fake-cuda")]


@contextmanager
def running_on(engine: Engine | str, *, io_threads: int = 1, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Set up a backend of `ENGINES` or `BACKENDS` for the block, and yield the options that select it.

    `io_threads` is for the backend "host-staged". `seed` is for "fake-cuda", and draws the order in which its
    streams run. The test fails if a run leaves memory allocated or pinned on the fake device.
    """
    backend, kernel = (engine, None) if isinstance(engine, str) else engine
    options = {"backend": backend} | ({"kernel": kernel} if kernel else {})
    if backend == "host-staged":
        with staged(io_threads):
            yield options | {"backend": "host"}
    elif backend == "fake-cuda":
        with fake_cuda(seed) as device:
            yield {"kernel": "cublas"} | options | {"backend": "cuda"}
            device.check()
    else:
        yield options


@contextmanager
def staged(io_threads: int = 1) -> Iterator[None]:
    """Make the host backend use host slots and copies to a device, as a GPU does, for the block."""

    def model(backend: str, *known: object) -> MachineModel:
        return replace(default_model(backend, 2), unified=False, io_threads=io_threads)

    with patch.object(rates, "default_model", model):
        yield
