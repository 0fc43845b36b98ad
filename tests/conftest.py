"""What holds for every test."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.command import forget_threads, own_threads

# How long an example takes says more of the machine's load than of the code.
settings.register_profile("oocgemm", deadline=None)
settings.load_profile("oocgemm")

SECONDS_TO_END = 10.0  # for threads that a test has stopped, on a busy machine


@pytest.fixture(scope="session", autouse=True)
def _no_calibration_but_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans must not depend on what this machine's cache knows of it, nor do those of processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OOCGEMM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _each_test_ends_its_threads() -> Iterator[None]:
    """A test that leaks a thread of a run fails; the tests after it do not."""
    forget_threads()
    yield
    until = time.monotonic() + SECONDS_TO_END
    while (left := own_threads()) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == [], "this test has leaked threads"
