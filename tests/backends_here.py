"""Which backends tests run on: host everywhere, cuda (marked gpu) where a device answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from oocgemm import backends
from oocgemm.errors import BackendError
from oocgemm.machine import info as system
from oocgemm.planning import MachineModel, default_model


def _cuda_answers() -> bool:
    try:
        backends.open_backend("cuda")
    except BackendError:
        return False
    return True


CUDA = _cuda_answers()

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device answers")]

BACKENDS = [pytest.param("host"), pytest.param("cuda", marks=needs_gpu)]
ENGINES = [
    pytest.param(("host", "auto"), id="host"),
    pytest.param(("host-staged", "auto"), id="host-staged"),
    pytest.param(("cuda", "cublas"), id="cublas", marks=needs_gpu),
    pytest.param(("cuda", "tiled"), id="tiled", marks=needs_gpu),
]


@contextmanager
def staged(io_threads: int = 1) -> Iterator[None]:
    """The host backend with host slots and copies to a device, as a GPU has them."""

    def model(backend: str, *known: object) -> MachineModel:
        return replace(default_model(backend, 2), unified=False, io_threads=io_threads)

    with patch.object(system, "model", model):
        yield
