"""The page of the service in a headless Chromium, with a real server."""

import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from oocgemm.service import dispatcher
from tests.support.browser import CONTRAST, FAULTS, MISSING, Page, browser
from tests.support.real_server import RealServer
from tests.support.service_pages import (
    PROGRAM,
    STATE,
    TILES,
    complaints,
    page_server,
    sign_in,
    squares,
    text,
)
from tests.support.suite import slow

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
# JavaScript that loses the answer to the next submission.
LOSE_ANSWER = """(() => { const right = window.fetch; window.fetch = async (...sent) => {
  const answer = await right(...sent);
  if (sent[0] !== "/v1/jobs") return answer;
  window.fetch = right;
  throw new TypeError("lost");
}; })()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with page_server(tmp_path_factory.mktemp("server")) as found:
        genotypes = np.random.default_rng(1).integers(0, 3, (12, 40)).astype(np.int8)
        np.save(found.data / "G.npy", genotypes)
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


def next_login(server: RealServer) -> str:
    """Return the URL that the server prints after its last one has been used."""
    assert server.process is not None
    assert server.process.stdout is not None
    words, _, url = server.process.stdout.readline().strip().partition(": ")
    assert words == "to sign in once more"
    return url


def answer_headers(page: Page, end: str) -> dict[str, str]:
    """Wait for an answer whose URL has this end, and return its headers."""
    while True:
        page.js("1")
        for event in page.events:
            if event.get("method") == "Network.responseReceived":
                answer = event["params"]["response"]
                if answer["url"].endswith(end):
                    return {name.lower(): value for name, value in answer["headers"].items()}
        time.sleep(0.02)


def focused(page: Page) -> str:
    """Return the id of the element that has the focus; its text if it has none."""
    return str(page.js("document.activeElement.id || document.activeElement.textContent"))


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element with an id or a text has the focus, which must then be visible."""
    for _ in range(60):
        page.press("Tab")
        if focused(page) == name:
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.js(outline) != "none", f"the focus on {name} cannot be seen"
            return
    raise AssertionError(f"Tab does not reach {name}")


def fill(page: Page, **texts: str) -> None:
    for name, value in texts.items():
        page.until(f"document.getElementById('field-{name}')")
        page.js("document.querySelector('details').open = true")
        page.js(f"document.getElementById('field-{name}').select()")
        page.type(value)


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_a_job_is_submitted_and_followed_by_keyboard(
    opened: Page, server: RealServer, width: int, theme: str
) -> None:
    """Start at the sign-in URL that the server prints, and end at the report of the job."""
    opened.call("Network.clearBrowserCookies")
    opened.open("about:blank")
    opened.events.clear()
    opened.open(server.login, width=width, theme=theme)
    server.login = next_login(server)
    opened.until("document.querySelector('h1')?.textContent === 'Queue'")
    assert opened.js("location.hash + location.search") == ""
    opened.press("Tab")
    assert focused(opened) == "skip"
    opened.press("Enter")
    assert focused(opened) == "main"
    tab_to(opened, "New job")
    opened.press("Enter")
    opened.until("document.querySelector('form.new')")
    assert focused(opened) == "New job"  # the heading
    for name, value in {"a": "data:A.npy", "b": "data:B.npy", "c": f"out:{width}.npy"}.items():
        tab_to(opened, f"field-{name}")
        opened.type(value)
    tab_to(opened, "More options")
    opened.press("Enter")
    tab_to(opened, "field-tile")
    opened.type("16x16x16")
    plan = opened.until("document.querySelector('[data-state=planned] .plan')?.textContent")
    assert "64 × 64 × 64" in plan
    tab_to(opened, "Submit job")
    opened.press("Enter")
    opened.until(STATE.format("succeeded"))
    whole = "[...document.querySelectorAll('.tiles .done')].filter((e) => Number(e.style.opacity) === 1)"
    opened.until(f"{whole}.length === 16")
    tab_to(opened, "Open in a tab of its own")
    opened.js("document.querySelector('iframe').scrollIntoView()")
    policy = answer_headers(opened, "/report")["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert complaints(opened, server) == []
    server.check(f"{width}.npy")


def test_a_link_works_once(opened: Page, server: RealServer) -> None:
    opened.call("Network.clearBrowserCookies")
    opened.open(f"{server.url}/login?code=guessed")
    opened.until("document.querySelector('h1')?.textContent === 'Sign in'")
    assert "used before" in text(opened, ".notice")
    assert opened.js("document.querySelector('nav').hidden")
    opened.type("oocgemm_no_token")
    opened.press("Enter")
    opened.until("document.querySelector('#token-wrong').textContent.includes('token')")
    assert focused(opened) == "token"
    opened.js("document.activeElement.select()")
    opened.type(server.token("read", "reader"))
    opened.press("Enter")
    opened.until("document.querySelector('h1')?.textContent === 'Queue'")
    assert text(opened, "#user") == "reader"
    assert complaints(opened, server, refused=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
def test_every_view_fits_and_can_be_read(page: Page, server: RealServer, width: int) -> None:
    long_name = "a-name-without-spaces-" * 8
    held = server.submit(f"{width}held.npy", name=long_name, held=True, options=TILES)
    number = server.submit(f"{width}done.npy", name=EVIL, options=TILES)["id"]
    server.until(number, "succeeded")
    for view, ready in {
        "#/": f"document.querySelector('a[href=\"#/jobs/{held['id']}\"]')",
        "#/new": "document.querySelector('fieldset > .note')?.textContent",
        f"#/jobs/{number}": STATE.format("succeeded"),
        f"#/jobs/{held['id']}": STATE.format("held"),
        "#/jobs/none": "document.querySelector('.nothing')",
        "#/nowhere": "document.querySelector('.nothing')",
    }.items():
        page.open("about:blank")
        page.open(f"{server.url}/{view}", width=width)
        page.until(ready)
        page.js("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.painted()
        assert page.js(FAULTS) == [], view
        for theme in ("light", "dark"):
            page.prefer(theme)
            page.until(f"document.documentElement.dataset.theme === '{theme}'")
            assert page.js(CONTRAST) == [], (view, theme)
        assert page.js("document.querySelectorAll('main :is(script, img)').length") == 0
        fields = "[...document.querySelectorAll('input, select')]"
        assert page.js(f"{fields}.filter((e) => !e.hidden && !e.labels.length).length") == 0
    assert complaints(page, server, refused=True) == []


def test_a_name_is_text_and_never_markup(page: Page, server: RealServer) -> None:
    number = server.submit("evil.npy", name=EVIL)["id"]
    page.open(f"{server.url}/#/jobs/{number}")
    page.until("document.querySelector('.named h1')?.textContent.startsWith('<script>')")
    assert text(page, ".named h1") == EVIL
    page.open(f"{server.url}/#/")
    page.until(f"document.querySelector('a[href=\"#/jobs/{number}\"]')")
    assert page.js("document.querySelectorAll('main :is(script, img)').length") == 0
    assert complaints(page, server) == []


def test_tiles_and_lanes_of_a_running_job_are_shown(page: Page, server: RealServer) -> None:
    """The job's process is stopped, and the test writes the files that it would write."""
    job = server.submit("stopped.npy", name="stopped", options=TILES)
    server.until(job["id"], "running", "succeeded")
    folder = server.state / "jobs" / job["id"]
    process = dispatcher.attach(folder)
    assert process is not None, "the job has ended before it could be stopped"
    process.send(signal.SIGSTOP)
    try:
        (folder / "live.json").write_text('{"busy": {"read": 0.25, "compute": 0.5}, "limit": "read-bound"}')
        with open(folder / "tiles", "a") as tiles:
            tiles.write("1 0 1\n1 2 3\n")
        page.open(f"{server.url}/#/jobs/{job['id']}")
        page.until("document.querySelectorAll('.busy li').length === 2")
        assert text(page, ".limit") == "Read-bound"
        assert [text(page, f".busy .lane-{lane} .n") for lane in ("read", "compute")] == ["25%", "50%"]
        page.until("document.querySelector('.tiles')?.getAttribute('aria-label')?.startsWith('2 of 16')")
        assert squares(page) == [1, 11]
        (folder / "live.json").write_text('{"busy": {"write": 1, "read": 0.5}, "limit": null}')
        with open(folder / "tiles", "a") as tiles:
            tiles.write("1 3 3\n")
        page.until("document.querySelector('.tiles')?.getAttribute('aria-label')?.startsWith('3 of 16')")
        assert squares(page) == [1, 11, 15]
        page.until("document.querySelectorAll('.busy li').length === 3")
        lines = "[...document.querySelectorAll('.busy li')].map((e) => e.textContent)"
        assert page.js(lines) == ["read50%", "compute0%", "write100%"]
        assert page.js("document.querySelector('.limit').hidden")
        page.open(f"{server.url}/#/")
        card = page.until("document.querySelector('.device .busy')?.closest('.device').textContent")
        assert "3 of 16 tiles" in card
    finally:
        process.send(signal.SIGCONT)
        process.close()
    server.until(job["id"], "succeeded")
    assert complaints(page, server) == []


@pytest.mark.slow
def test_actions_change_the_state_and_are_announced(page: Page, server: RealServer) -> None:
    number = server.submit("acts.npy", held=True)["id"]
    page.open(f"{server.url}/#/jobs/{number}")
    page.until(STATE.format("held"))
    tab_to(page, "Cancel")
    page.press("Enter")
    page.until(STATE.format("cancelled"))
    page.until("document.getElementById('said').textContent.includes('cancelled')")
    assert page.js("document.activeElement === document.querySelector('h1')")  # its button is gone
    tab_to(page, "Retry")
    page.press(" ")
    page.until(STATE.format("succeeded"))  # its events come from the stream of all jobs
    lines = page.js("[...document.querySelectorAll('.history li span')].map((e) => e.textContent)")
    assert re.fullmatch(r"Submitted by .*, held", lines[0])
    assert lines[1:3] == ["Cancelled", "Retried"]
    assert complaints(page, server) == []


def test_readers_see_jobs_and_no_buttons(page: Page, server: RealServer) -> None:
    number = server.submit("read.npy", held=True)["id"]
    sign_in(page, server, server.token("read", "reader"))
    page.open(f"{server.url}/#/jobs/{number}")
    page.until(STATE.format("held"))
    assert page.js("document.querySelector('.actions').children.length") == 0


def test_a_failed_job_shows_why(page: Page, server: RealServer) -> None:
    (server.data / "gone.npy").write_bytes((server.data / "A.npy").read_bytes())
    number = server.submit("gone.npy", a="data:gone.npy", held=True)["id"]
    (server.data / "gone.npy").unlink()
    page.open(f"{server.url}/#/jobs/{number}")
    page.until(STATE.format("held"))
    server.ask("POST", f"/v1/jobs/{number}/release")
    page.until(STATE.format("failed"))
    assert "there is nothing at" in text(page, ".verdict")
    page.until("document.querySelector('.log').textContent.includes('there is nothing at')")
    assert complaints(page, server) == []


def test_a_refused_field_says_why(page: Page, server: RealServer) -> None:
    page.open(f"{server.url}/#/new")
    fill(page, a="data:A.npy", b="data:none.npy", c="out:refused.zarr")
    for name, wrong, right, words in (
        ("b", None, "data:B.npy", "there is nothing at this path"),
        ("device_memory", "1KiB", "1GiB", "cannot hold the smallest plan"),
        ("priority", "5000", "5", "less than or equal to 1000"),
        ("chunks", "ten", "16x16", "valid"),
        ("tile", "x", "16x16x16", "as a tile"),
        ("alpha", "one", "1", "must be a number"),
    ):
        if wrong is not None:
            fill(page, **{name: wrong})
        field = f"document.getElementById('field-{name}')"
        page.until(f"{field}.matches('[aria-invalid=true]')")
        described = page.js(f"{field}.getAttribute('aria-describedby').split(' ').at(-1)")
        assert words in text(page, f"#{described}"), name
        assert page.js("document.querySelectorAll('[aria-invalid]').length") == 1
        fill(page, **{name: right})
        page.until("document.querySelector('[data-state=planned]')")
        assert page.js("document.querySelectorAll('[aria-invalid]').length") == 0
    assert complaints(page, server, refused=True) == []


def test_the_smallest_budget_is_offered(page: Page, server: RealServer) -> None:
    page.open(f"{server.url}/#/new")
    fill(page, a="data:A.npy", b="data:B.npy", c="out:small.npy", device_memory="1KiB")
    page.until("document.querySelector('[data-state=refused]')")
    tab_to(page, "Use the smallest budget")
    page.press("Enter")
    page.until("document.querySelector('[data-state=planned]')")
    assert page.js("document.getElementById('field-device_memory').value").endswith("MiB")


@pytest.mark.slow
def test_a_request_whose_answer_is_lost_submits_one_job(page: Page, server: RealServer) -> None:
    page.open(f"{server.url}/#/new")
    fill(page, a="data:A.npy", b="data:B.npy", c="out:lost.npy", name="lost")
    page.until("document.querySelector('[data-state=planned]')")
    page.js(LOSE_ANSWER)
    page.js("document.querySelector('.dry .primary').click()")
    page.until("document.querySelector('.dry > .bad').textContent.includes('not be submitted twice')")
    page.js("document.querySelector('.dry .primary').click()")
    page.until(STATE.format("succeeded"))
    jobs = server.ask("GET", "/v1/jobs?limit=1000").json()["jobs"]
    assert [job["name"] for job in jobs].count("lost") == 1


@pytest.mark.slow
def test_it_connects_again_after_a_restart(page: Page, server: RealServer) -> None:
    page.open(f"{server.url}/#/")
    page.until("document.getElementById('connection').dataset.state === 'live'")
    server.end()
    page.until("document.getElementById('connection').dataset.state === 'lost'")
    assert "cannot be reached" in text(page, "#lost")
    assert page.js(CONTRAST) == []
    server.start()
    number = server.submit("after.npy", name="after the restart", held=True)["id"]
    page.until("document.getElementById('connection').dataset.state === 'live'")
    page.until(f"document.querySelector('a[href=\"#/jobs/{number}\"]')")
    assert page.js("document.getElementById('lost').hidden")
    assert complaints(page, server, refused=True) == []


@pytest.mark.parametrize(("rows", "columns"), [(1, 1000), (301, 777), *slow((1, 1), (48, 64), (1000, 1))])
def test_a_grid_of_many_tiles_stays_legible(page: Page, server: RealServer, rows: int, columns: int) -> None:
    page.open(f"{server.url}/#/new")
    found = page.js(
        "import('/static/tiles.js').then(({ tiles }) => { const [element, set] = tiles(), done = [];"
        "document.querySelector('main').replaceChildren(element);"
        f"for (let r = 0; r < {rows}; r += 1) for (let c = 0; c < {columns}; c += 1) done.push([r, c]);"
        "const plan = { tile: [16, 16, 16] }, read = () => {"
        "const all = [...element.querySelectorAll('.done')].map((e) => Number(e.style.opacity));"
        "return [all.length, all.filter((share) => share === 1).length]; };"
        f"set({{ rows: {rows}, columns: {columns}, done: done.slice(0, -1) }}, plan); const before = read();"
        f"set({{ rows: {rows}, columns: {columns}, done }}, plan);"
        "const box = element.querySelector('rect').getBoundingClientRect();"
        "return [before, read(), Math.min(box.width, box.height)]; })"
    )
    before, after, side = found
    assert before[0] == after[0] <= 64 * 48
    assert (before[1], after[1]) == (after[0] - 1, after[0])
    assert side >= 5  # pixels


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_jobs_of_other_verbs_are_submitted_and_shown(
    page: Page, server: RealServer, width: int, theme: str
) -> None:
    page.open(f"{server.url}/#/new", width=width, theme=theme)
    page.until("document.getElementById('verb')")
    for verb, texts, shown in (
        ("grm", {"x": "data:G.npy"}, "elements, 12 × 12: the first"),
        ("similarity", {"e": "data:A.npy", "topk": "3"}, "scores, 64 × 3: the first"),
        ("pca", {"x": "data:A.npy", "k": "4", "transform": "scale=k"}, "Singular values, from"),
    ):
        page.open(f"{server.url}/#/new?verb={verb}", width=width, theme=theme)
        page.until(f"document.getElementById('verb')?.value === '{verb}'")
        fill(page, **texts, out=f"out:{verb}-{width}.zarr")
        page.until("document.querySelector('.dry [data-state=planned]')")
        # On a phone, the button stays at the lower edge of the window, over the fields.
        assert [each for each in page.js(FAULTS) if not each.endswith('lies on "Submit job"')] == []
        page.press("Enter")
        page.until(STATE.format("succeeded"))
        page.until("document.querySelector('.preview')")
        assert shown in text(page, ".preview")
        assert f"{verb}-{width}.zarr = {verb}(" in text(page, "h1")
        assert ("-bound" in text(page, ".verdict")) == (verb != "pca")
        assert page.js(FAULTS) == []
        assert page.js(CONTRAST) == []
        assert complaints(page, server) == []
    page.js("[...document.querySelectorAll('.actions a')].at(-1).click()")  # submit again
    page.until("document.getElementById('field-transform')?.value === 'scale=k'")
    assert page.js("document.getElementById('field-k').value") == "4"


def test_a_problem_with_two_fields_is_said_once(page: Page, server: RealServer) -> None:
    page.open(f"{server.url}/#/new")
    fill(page, a="data:A.npy", b="data:G.npy", c="out:wrong.npy")
    page.until("document.querySelector('.dry [data-state=refused]')")
    said = page.js("document.querySelector('main').textContent.split('hapes do not match').length - 1")
    assert said == 1
    assert "hapes do not match" in text(page, ".dry .finding")
    assert page.js("document.querySelectorAll('[aria-invalid=true]').length") == 2
