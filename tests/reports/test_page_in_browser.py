"""The HTML page in a headless Chromium: layout, zoom, tooltips, themes, printing and drawing time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oocgemm.planning import RATES, Budgets
from oocgemm.reports.charts import roofline
from oocgemm.reports.exports import page
from oocgemm.timeline import Span, Timeline
from tests.support.browser import FAULTS, MISSING, Page, browser, find_browser
from tests.support.virtual_runs import GIB, machine, run_of, virtual_plan

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
# JavaScript that finds cards whose content can only be seen by scrolling sideways.
SCROLLED = """[...document.querySelectorAll(".card")].filter((e) => e.scrollWidth > e.clientWidth)
  .map((e) => e.innerText.slice(0, 30))"""


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    run = run_of(virtual_plan((8192, 8192, 8192), Budgets(GIB // 4, GIB), machine(h2d=8e9)), jitter=0.3)
    long_name = "/data/" + "a-long-folder-name/" * 6 + "run.jsonl"
    backend = run.header["backend"] | {"device": "NVIDIA GH200 480GB with a name that is rather long"}
    run = Timeline(run.spans, run.wall, dict(run.header) | {"backend": backend})
    (folder / "one.html").write_text(page([(long_name, run)]))
    slower = Timeline(run.spans, round(1.3 * run.wall), run.header)
    (folder / "two.html").write_text(page([(long_name, run), ("b.jsonl", slower)]))
    return folder / "one.html"


def made(count: int) -> Timeline:
    """Return a timeline of `count` spans on five lanes."""
    spans = []
    lanes = (
        ("read", "read"),
        ("upload", "h2d"),
        ("multiply", "compute"),
        ("download", "d2h"),
        ("write", "write"),
    )
    for n in range(count):
        kind, lane = lanes[n % 5]
        start = n // 5 * 1_000_000 + n % 5 * 150_000
        spans.append(
            Span(
                n,
                kind,
                "AB"[n % 2],
                lane,
                lane,
                0,
                (n // 5000, 0),
                n % 5000,
                start,
                start + 900_000,
                1 << 23,
                1000,
            )
        )
    return Timeline(tuple(spans), spans[-1].end)


def complaints(shown: Page) -> list[object]:
    """Return the errors and the network requests of the page since the last call."""
    kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    found: list[object] = [e for e in shown.events if e.get("method") in kinds]
    asked = [
        e["params"]["request"]["url"] for e in shown.events if e.get("method") == "Network.requestWillBeSent"
    ]
    shown.events.clear()
    return found + [url for url in asked if not url.startswith("file:")]


def view(shown: Page) -> tuple[float, float]:
    start, end = shown.js("[view.from, view.to]")
    return start, end


def place(shown: Page, x: float = 0.5, lane: str = "compute") -> tuple[float, float]:
    """Return the position of a lane of the first chart in the browser window.

    `x` is a share of the visible time.
    """
    left, top = shown.js(
        "(() => { const g = gantts[0]; g.canvas.scrollIntoView({block: 'center'});"
        "const r = g.canvas.getBoundingClientRect();"
        f"return [r.left + GUTTER + {x} * (g.width - GUTTER),"
        f"r.top + g.tops[g.run.lanes.indexOf('{lane}')] + 5]; }})()"
    )
    return left, top


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", [1440, 1024, 700, 390])
def test_nothing_overlaps_or_overflows(shown: Page, one: Path, name: str, width: int) -> None:
    for theme in ("light", "dark"):
        shown.open(one.with_name(f"{name}.html"), width=width, theme=theme)
        assert shown.js(FAULTS) == []
        assert shown.js(SCROLLED) == []
        assert complaints(shown) == []


def test_hovering_says_what_a_span_was(shown: Page, one: Path) -> None:
    shown.open(one)
    span = shown.js("(() => { const g = gantts[0]; const i = g.rows[g.run.lanes.indexOf('h2d')][0][3];"
        "view.show(g.start[i] - 2e6, g.end[i] + 2e6);"
        "return [g.start[i], g.end[i], g.run.sizes[g.run.spans.size[i]][0],"
        "g.run.tiles[g.run.spans.tile[i]].join(', '), g.run.spans.step[i]]; })()")  # fmt: skip
    start, end, size, tile, step = span
    shown.painted()
    assert shown.js("document.getElementById('tip').hidden")
    left, right = view(shown)
    shown.mouse("mouseMoved", *place(shown, ((start + end) / 2 - left) / (right - left), "h2d"))
    shown.painted()
    lines = shown.js(
        "[...document.querySelectorAll('#tip > *')].map((e) => e.innerText.replace(/\\s+/g, ' '))"
    )
    assert lines[0].startswith("Upload ")
    facts = dict(line.split(" ", 1) for line in lines[1:])
    assert facts["tile"] == tile
    assert facts["step"] == str(step)
    assert facts["bytes"] == shown.js(f"formatSize({size})")
    assert facts["rate"] == f"{size / (end - start):.3g} GB/s"
    assert "ended" in facts["predecessor"]
    inside = shown.js("(() => { const r = document.getElementById('tip').getBoundingClientRect();"
        "return r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight;"
        "})()")  # fmt: skip
    assert inside
    shown.mouse("mouseMoved", 5, 5)
    assert shown.js("document.getElementById('tip').hidden")


def test_zooming_keeps_the_time_under_the_pointer(shown: Page, one: Path) -> None:
    shown.open(one)
    whole = view(shown)
    x, y = place(shown, 0.25)
    at = whole[1] * 0.25
    for _ in range(3):
        shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300, modifiers=2)
    zoomed = view(shown)
    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 10
    assert (at - zoomed[0]) / (zoomed[1] - zoomed[0]) == pytest.approx(0.25, abs=0.01)
    length = zoomed[1] - zoomed[0]
    shown.drag(place(shown, 0.75), place(shown, 0.25))
    panned = view(shown)
    assert panned[0] - zoomed[0] == pytest.approx(length / 2, rel=0.02)
    assert panned[1] - panned[0] == pytest.approx(length)
    for key, text in (("ArrowRight", ""), ("+", "+"), ("-", "-"), ("0", "0")):
        before = view(shown)
        shown.js("gantts[0].canvas.focus()")
        shown.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        assert view(shown) != before, key
    assert view(shown) == whole


def test_a_plain_wheel_scrolls_the_page(shown: Page, one: Path) -> None:
    shown.open(one, height=500)
    x, y = place(shown)
    before, whole = shown.js("scrollY"), view(shown)
    shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=200)
    for _ in range(30):
        shown.painted()
    assert shown.js("scrollY") != before
    assert view(shown) == whole


def test_buttons_the_overview_and_tiles_of_c_move_the_view(shown: Page, one: Path) -> None:
    shown.open(one)
    whole = view(shown)
    shown.js("document.querySelector('[data-zoom=in]').click()")
    half = view(shown)
    assert half[1] - half[0] == pytest.approx(whole[1] / 2)
    assert shown.js("document.getElementById('range').textContent").count(" to ") == 1
    x, y = shown.js(
        "(() => { gantts[0].overview.scrollIntoView();"
        "const r = gantts[0].overview.getBoundingClientRect(); return [r.right - 3, r.top + 8]; })()"
    )
    shown.click(x, y)
    assert view(shown)[1] == whole[1]
    shown.js("document.querySelector('[data-zoom=all]').click()")
    assert view(shown) == whole
    end = shown.js("(() => { const cell = document.querySelector('.grid rect');"
        "cell.dispatchEvent(new MouseEvent('click',"
        "{bubbles: true})); return Number(cell.dataset.end); })()")  # fmt: skip
    assert view(shown)[1] == end
    assert view(shown) != whole


def test_the_theme_follows_the_reader_and_can_be_switched(shown: Page, one: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = (
        "(() => { const { canvas } = gantts[0], context = canvas.getContext('2d');"
        "return [...context.getImageData(canvas.width - 3, 40, 1, 1).data].join(); })()"
    )
    shown.open(one, theme="light")
    light = shown.js(ground), shown.js(ink)
    shown.js("document.getElementById('theme').click()")
    dark = shown.js(ground), shown.js(ink)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert shown.js("document.getElementById('theme').textContent") == "Light"
    shown.open(one, theme="dark")
    assert (shown.js(ground), shown.js(ink)) == dark
    shown.prefer("light")
    shown.painted()
    assert shown.js(ground) == light[0]


def test_it_is_printed_on_white_and_stays_as_it_was(shown: Page, one: Path) -> None:
    shown.open(one, theme="dark")
    shown.js(
        "addEventListener('beforeprint', () => { window.printed = document.documentElement.dataset.theme; })"
    )
    printed = shown.pdf()
    assert printed.startswith(b"%PDF")
    assert shown.js("window.printed") == "light"
    assert shown.js("document.documentElement.dataset.theme") == "dark"
    shown.call("Emulation.setEmulatedMedia", media="print")
    assert shown.js("getComputedStyle(document.querySelector('.tools')).display") == "none"


def test_two_runs_are_looked_at_through_one_window(shown: Page, one: Path) -> None:
    shown.open(one.with_name("two.html"))
    assert shown.js("gantts.length") == 2
    shown.js("view.zoom(3)")
    shown.painted()
    assert shown.js("gantts.every((g) => g.view === view && g.x(view.from) === GUTTER)")


@pytest.mark.slow
def test_a_hundred_thousand_spans_are_drawn_in_bounded_work(shown: Page, folder: Path) -> None:
    """The width of the chart limits the number of boxes. Time grows at most about as fast as the spans do."""
    medians = {}
    shown.events.clear()
    for count in (10_000, 100_000):
        path = folder / f"{count}.html"
        path.write_text(page([("run.jsonl", made(count))]))
        shown.open(path)
        first = shown.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
        longest, median = shown.js("""(() => {
          const times = [];
          for (let i = 0; i < 25; i += 1) {
            view.zoom(i % 2 ? 0.9 : 1.1);
            const start = performance.now();
            gantts[0].paint();
            times.push(performance.now() - start);
          }
          times.sort((a, b) => a - b);
          return [times.at(-1), times[12]];
        })()""")
        medians[count] = median
        print(f"{count} spans: loaded in {first:.0f} ms, a frame {median:.1f} ms, at most {longest:.1f} ms")
        drawn = shown.js("""(() => {
          let calls = 0;
          const fill = CanvasRenderingContext2D.prototype.fillRect;
          CanvasRenderingContext2D.prototype.fillRect = function (...box) {
            calls += 1;
            fill.apply(this, box);
          };
          view.all();
          gantts[0].paint();
          CanvasRenderingContext2D.prototype.fillRect = fill;
          return calls / gantts[0].width;
        })()""")
        # Each column of pixels has boxes of five lanes, with up to two rows each, and of some causes of
        # waits.
        assert drawn < 5 * 2 + 5
    assert medians[100_000] < 40 * max(medians[10_000], 0.5)
    assert complaints(shown) == []


def test_labels_of_a_roofline_lie_apart_in_light_and_dark(shown: Page, folder: Path) -> None:
    path = folder / "roofline.svg"
    links = {
        "h2d": 5.5e10,
        "read, page cache": 5.4e10,
        "read, memory": 5.3e10,
        "decode, zstd": 3e9,
        "read, disk": 2e9,
    }
    rates = 600, 599, 58, 57, 56, 55, 1100, 190, 95
    roofs = {name: rate * 1e12 for name, rate in zip(RATES, rates, strict=True)}
    path.write_text(roofline("NVIDIA H200, calibrated on 2026-11-21", links, roofs, 1 << 37))
    grounds = set()
    for theme in ("light", "dark"):
        shown.open(path, width=1100, theme=theme)
        assert (
            shown.js("""(() => {
          const drawn = document.documentElement.getBoundingClientRect(), found = [];
          const elements = [...document.querySelectorAll("text")];
          const texts = elements.map((e) => [e.getBoundingClientRect(), e.textContent]);
          texts.forEach(([a, one], i) => {
            const inside = a.left >= drawn.left && a.right <= drawn.right && a.bottom <= drawn.bottom;
            if (!inside) found.push(`${one} leaves the picture`);
            texts.slice(i + 1).forEach(([b, other]) => {
              const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (across > 0 && down > 2) found.push(`${one} lies on ${other}`);
            });
          });
          return texts.length ? found : ["there is no text"];
        })()""")
            == []
        )
        grounds.add(shown.js("getComputedStyle(document.documentElement).backgroundColor"))
    assert len(grounds) == 2
