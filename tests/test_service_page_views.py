"""What the page of the service shows of a job, in a headless Chromium, with a real server."""

import signal
from collections.abc import Iterator

import pytest

from oocgemm.service import launch
from tests.browser import Page, browser
from tests.real_server import RealServer
from tests.service_pages import MISSING, PROGRAM, TILES, complaints, page_server, sign_in, text

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
# JavaScript that makes all later answers about jobs older than they are: no tile is done.
OLD_ANSWERS = """(() => { const right = window.fetch; window.old = 0; window.fetch = async (...sent) => {
  const answer = await right(...sent);
  if (!/^[/]v1[/](jobs[/]\\w+|queue.*)$/.test(sent[0])) return answer;
  const found = await answer.json();
  for (const job of found.active ?? [found]) if (job.progress) job.progress.done = 0;
  window.old += 1;
  return Response.json(found);
}; })()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with page_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def opened() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as found:
        yield found


@pytest.fixture
def page(opened: Page, server: RealServer) -> Page:
    """A page of somebody who has signed in with a token."""
    sign_in(opened, server, server.token("admin", "somebody"))
    return opened


def test_an_answer_that_comes_late_does_not_turn_progress_back(page: Page, server: RealServer) -> None:
    """The job's process is stopped, and the test writes the files that it would write."""
    job = server.submit("late.npy", options=TILES)
    server.until(job["id"], "running", "succeeded")
    folder = server.state / "jobs" / job["id"]
    process = launch.attach(folder)
    assert process is not None, "the job has ended before it could be stopped"
    process.send(signal.SIGSTOP)
    try:
        with open(folder / "tiles", "a") as tiles:
            tiles.write("1 0 1\n1 2 3\n")
        for view, shown in (f"jobs/{job['id']}", ".figures dd"), ("", ".on-device .meta span"):
            page.open("about:blank")
            page.open(f"{server.url}/#/{view}")
            page.until(f"document.querySelector('{shown}')?.textContent.startsWith('2 ')")
            page.js(OLD_ANSWERS)
            page.until("window.old > 0")
            page.painted()
            assert text(page, shown).startswith("2 ")
    finally:
        process.send(signal.SIGCONT)
        process.close()
    server.until(job["id"], "succeeded")
    assert complaints(page, server) == []
