"""Options and fixtures of all tests."""

import gc
import time
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from oocgemm.backends import registry
from oocgemm.planning.search import planner
from tests.support.command import forget_threads, own_threads
from tests.support.native import builds
from tests.support.object_server import Proxy
from tests.support.suite import leave_samples

pytest_plugins = ["tests.support.missing", "tests.support.staying"]
# No deadline: the time of an example depends on the load of the machine more than on the code.
settings.register_profile("all", deadline=None, print_blob=True)
# The quick suite draws the same examples in each run. `tests.support.suite.examples` scales their numbers.
settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True, database=None)

QUICK = "not slow"
SECONDS_TO_END = 10.0  # time in which the threads of a test must end, on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run slow tests too, and every property on all examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Select the quick suite, unless the command line selects tests: by --all, -m, -k or paths."""
    option = config.option
    by_path = config.args_source is config.ArgsSource.ARGS
    if not (option.all or option.markexpr or option.keyword or by_path):
        option.markexpr = QUICK  # pytest-xdist passes this option to its workers
    settings.load_profile("quick" if option.markexpr == QUICK else "all")


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    with builds():  # around the whole run, since workers of pytest-xdist build too
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == QUICK:
        leave_samples(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have the garbage collector pass over the tests themselves.

    It runs whenever a run fails, and takes 0.3 s for half a million objects that pytest has created.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_calibration_but_the_tests_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache folder in tests and in the processes that they start, and do not probe the machine.

    Otherwise plans would depend on the rates of this machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OOCGEMM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OOCGEMM_PROBE", "0")
        yield


@pytest.fixture(autouse=True)
def _no_plan_of_another_test() -> None:
    """Tests may patch constants of the planner. A plan that is made then must not reach another test."""
    for cached in (planner._planned, planner._plan_with_advice):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _each_test_ends_its_threads() -> Iterator[None]:
    """Fail a test that leaves a thread of a run alive. Later tests do not fail for that thread.

    What runs keep for the next one is freed.
    """
    forget_threads()
    yield
    registry.release()
    until = time.monotonic() + SECONDS_TO_END
    while (left := own_threads(kept=True)) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == [], "this test has leaked threads"


@pytest.fixture(scope="session")
def zarr_has_its_threads() -> None:
    """Let zarr start its threads before the tests. Their file descriptors do not count as left behind."""
    import zarr

    zarr.ones((1,))[:]


@pytest.fixture
def retries_are_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs retry failed reads after a hundredth of a second."""
    from oocgemm.stores import base

    monkeypatch.setattr(base, "RETRY_AFTER", (0.01,) * 3)


@pytest.fixture
def python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python read stored elements, as if there were no compiled code for it."""
    monkeypatch.setattr("oocgemm.stores.files.compiled", lambda: None)


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    """The address of an S3 server."""
    from tests.support.object_server import s3_server

    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before an S3 server with an empty bucket. obstore finds it by its environment variables.

    Failed requests are soon repeated, and not often.
    """
    from oocgemm.stores import objects
    from tests.support.object_server import create_bucket, environment, proxy_before

    create_bucket(s3_address)
    monkeypatch.setattr(objects, "RETRIES", 3)
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.005)
    monkeypatch.setattr(objects, "LONGEST_WAIT", 0.02)
    with proxy_before(s3_address) as proxy:
        for name, value in environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
