// Sets the page up: charts, buttons, theme, printing.
const runs = JSON.parse(document.getElementById("data").textContent);

const tip = {
  element: document.getElementById("tip"),
  show(event, title, lines) {
    const heading = document.createElement("b");
    heading.textContent = title[0].toUpperCase() + title.slice(1);
    this.element.replaceChildren(heading, ...lines.map(([name, value]) => {
      const line = document.createElement("span"), label = document.createElement("em");
      label.textContent = name;
      line.append(label, String(value));
      return line;
    }));
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const x = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
    this.element.style.left = `${Math.max(4, x)}px`;
    this.element.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 4))}px`;
  },
  hide() { this.element.hidden = true; },
};

// All runs share one time scale, so that they can be compared.
const view = new View(Math.max(...runs.map((run) => run.wall)));
const dark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
const setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  button.textContent = theme === "dark" ? "Light" : "Dark";
};
setTheme(dark.matches ? "dark" : "light");

const gantts = [...document.querySelectorAll(".gantt")].map((element, n) => new Gantt(runs[n], element, view, tip));
const recolour = () => gantts.forEach((gantt) => gantt.recolour());
button.addEventListener("click", () => {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  recolour();
});
dark.addEventListener("change", () => {
  if (button.hidden) return;
  setTheme(dark.matches ? "dark" : "light");
  recolour();
});

// A page that shows this page in a frame gets the height, and may send a theme. Then that page has the theme button.
const framed = parent !== window;
addEventListener("message", ({ source, data }) => {
  if (!framed || source !== parent || !["light", "dark"].includes(data?.theme)) return;
  if (button.hidden && data.theme === document.documentElement.dataset.theme) return;
  button.hidden = true;
  setTheme(data.theme);
  recolour();
});
const sendHeight = () => parent.postMessage({ height: Math.ceil(document.body.getBoundingClientRect().height) }, "*");
if (framed) new ResizeObserver(sendHeight).observe(document.body);

// Print in the light theme.
let onScreen = null;
addEventListener("beforeprint", () => { onScreen = document.documentElement.dataset.theme; setTheme("light"); recolour(); });
addEventListener("afterprint", () => { setTheme(onScreen); recolour(); });

const range = document.getElementById("range");
const showRange = () => {
  // Enough digits to show a hundredth of the visible time.
  const digits = Math.min(9, Math.max(0, 2 - Math.floor(Math.log10(view.length / 1e9))));
  range.textContent = `${(view.from / 1e9).toFixed(digits)} to ${(view.to / 1e9).toFixed(digits)} s`;
};
view.listeners.push(showRange);
showRange();
const zooms = { in: () => view.zoom(2), out: () => view.zoom(0.5), all: () => view.all() };
document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", zooms[b.dataset.zoom]));

document.querySelectorAll(".grid").forEach((grid, n) => {
  const run = runs[n];
  const at = (event) => (event.target.dataset.tile ? event.target.dataset : null);
  grid.addEventListener("pointermove", (event) => {
    const cell = at(event);
    if (cell) tip.show(event, `tile ${cell.tile.replace(",", ", ")} of C`, [["finished", formatTime(Number(cell.end))]]);
    else tip.hide();
  });
  grid.addEventListener("pointerleave", () => tip.hide());
  grid.addEventListener("click", (event) => {
    const cell = at(event);
    if (!cell) return;
    const tile = run.tiles.findIndex((t) => t.join() === cell.tile), { start, end } = gantts[n];
    let from = Infinity, to = 0;
    run.spans.tile.forEach((t, i) => {
      if (t !== tile) return;
      from = Math.min(from, start[i]);
      to = Math.max(to, end[i]);
    });
    view.show(from, to);
    gantts[n].canvas.scrollIntoView({ block: "center" });
  });
});
