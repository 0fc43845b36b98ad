"""What holds for every test."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_calibration_but_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans must not depend on what this machine's cache knows of it, nor do those of processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OOCGEMM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
