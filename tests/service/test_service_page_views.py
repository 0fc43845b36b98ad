"""What the page of the service shows of a job, in a headless Chromium, with a real server."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from oocgemm.service import dispatcher
from tests.support.browser import DEADLINE, MISSING, Page, browser
from tests.support.real_server import RealServer
from tests.support.service_pages import PROGRAM, STATE, TILES, complaints, page_server, sign_in, text

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
    process = dispatcher.attach(folder)
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


def in_frame(page: Page, expression: str, wanted: Any = True) -> None:
    """Wait until an expression has a value in the frame of a page."""
    deadline, found = time.monotonic() + DEADLINE, list[Any]()
    while time.monotonic() < deadline:
        found = page.in_frames(expression)
        if found == [wanted]:
            return
        time.sleep(0.02)
    raise AssertionError(f"{expression} is {found!r} and not {wanted!r} in the frame")


@pytest.fixture(scope="module", params=["--site-per-process", "--disable-features=IsolateSandboxedIframes"])
def framing(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of a browser that runs sandboxed frames in processes of their own, and of one that does not."""
    assert PROGRAM is not None
    with browser(PROGRAM, request.param) as found:
        yield found


@pytest.mark.parametrize("width", [1440, 390])
def test_the_report_has_the_theme_and_the_scroll_bar_of_the_page(
    framing: Page, server: RealServer, width: int
) -> None:
    page = framing
    sign_in(page, server, server.token("admin", "somebody"))
    number = server.submit("report.npy", options=TILES | {"overwrite": True})["id"]
    server.until(number, "succeeded")
    page.open(f"{server.url}/#/jobs/{number}", width=width)
    page.until(STATE.format("succeeded"))
    page.js("document.querySelector('iframe').scrollIntoView()")
    for theme in ("light", "dark"):
        in_frame(page, "document.documentElement.dataset.theme", theme)
        in_frame(page, "document.getElementById('theme').checkVisibility()", False)
        in_frame(page, "Math.abs(innerHeight - document.body.offsetHeight) < 2")
        in_frame(page, "[...document.querySelectorAll('.card')].every((e) => e.scrollWidth <= e.clientWidth)")
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        page.js("document.getElementById('theme').click()")
    page.js("localStorage.clear()")
    page.js("postMessage({ height: 1 }, '*')")  # not from the frame
    page.painted()
    assert page.js("document.querySelector('iframe').clientHeight > 1000")
    assert complaints(page, server) == []


@pytest.mark.parametrize(
    ("tile", "rows", "columns", "ratio"),
    [((2000, 500), 1, 4, 1.0), ((16, 16), 2, 5, 2.5), ((100, 400), 2, 2, 4.0)],
)
def test_tiles_of_c_are_drawn_in_their_proportion(
    page: Page, server: RealServer, tile: tuple[int, int], rows: int, columns: int, ratio: float
) -> None:
    page.open(f"{server.url}/#/new")
    page.until("document.querySelector('form.new')")
    found = page.js(
        "import('/static/tiles.js').then(({ tiles }) => { const [element, set] = tiles();"
        "document.querySelector('main').replaceChildren(element);"
        f"set({{ rows: {rows}, columns: {columns}, done: [[0, 0]] }}, {{ tile: {[*tile, 1]} }});"
        "const box = element.querySelector('svg').getBoundingClientRect();"
        "const keys = [...element.querySelectorAll('.keys span')].filter((e) => !e.hidden);"
        "return [box.width / box.height, keys.map((e) => e.textContent)]; })"
    )
    assert found[0] == pytest.approx(ratio, rel=0.02)
    assert found[1] == ["not finished", "finished just now", "finished"]


@pytest.mark.slow
def test_actions_are_disabled_while_the_service_cannot_be_reached(page: Page, server: RealServer) -> None:
    number = server.submit("lost.npy", held=True)["id"]
    page.open(f"{server.url}/#/jobs/{number}")
    page.until(STATE.format("held"))
    enabled = "[...document.querySelectorAll('.actions button')].map((e) => !e.disabled)"
    assert page.js(enabled) == [True, True]
    server.end()
    page.until("document.getElementById('connection').dataset.state === 'lost'")
    assert page.js(enabled) == [False, False]
    server.start()
    page.until("document.getElementById('connection').dataset.state === 'live'")
    assert page.js(enabled) == [True, True]
