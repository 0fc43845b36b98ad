"""Which backends tests run on: host everywhere, cuda (marked gpu) where a device answers."""

import pytest

from oocgemm import backends
from oocgemm.errors import BackendError


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
    pytest.param(("cuda", "cublas"), id="cublas", marks=needs_gpu),
    pytest.param(("cuda", "tiled"), id="tiled", marks=needs_gpu),
]
