// The tiles of C: a grid whose boxes fill as tiles are finished. In a large grid, a box stands for several tiles, and
// is filled by the share of these tiles that is finished.
import { h, setText, show, svg } from "./dom.js";
import { count, extents, spaced } from "./words.js";

const MAX_COLUMNS = 64, MAX_ROWS = 48;
// In pixels: the longer side of a box, the shorter one, the grid, and the gap between boxes in shorter sides. A box has
// the proportion of what it stands for, unless it would be too narrow.
const MAX_SIDE = 120, MIN_SIDE = 6, MAX_WIDTH = 520, MAX_HEIGHT = 340, GAP = 0.08;

// Returns the grid, and a function that updates it. The grid of a plan has no finished tiles.
export const tiles = ({ planned = false } = {}) => {
  const picture = svg("svg", { role: "img", class: "tiles" }), note = h("p", { class: "note" });
  const key = (kind, text) => h("span", {}, h("i", { class: `box ${kind}` }), text);
  const partly = key("some", "some tiles finished");
  const legend = h("p", { class: "note keys" },
    key("none", "not finished"), partly, key("now", "finished just now"), key("all", "finished"));
  let boxes = [], across = 0, down = 0, known = new Set(), drawn = "";

  const build = (rows, columns, plan) => {
    [across, down] = [Math.ceil(columns / MAX_COLUMNS), Math.ceil(rows / MAX_ROWS)];
    const [wide, high] = [Math.ceil(columns / across), Math.ceil(rows / down)];
    const [n, m] = [across * plan.tile[1], down * plan.tile[0]];
    const scale = Math.min(MAX_SIDE / Math.max(m, n), MAX_WIDTH / (wide * n), MAX_HEIGHT / (high * m));
    const [width, height] = [n, m].map((side) => Math.max(MIN_SIDE, scale * side)), gap = GAP * Math.min(width, height);
    boxes = Array.from({ length: wide * high }, (_, place) => {
      const column = place % wide, row = Math.floor(place / wide);
      const all = Math.min(across, columns - column * across) * Math.min(down, rows - row * down);
      const [x, y] = [column * width + gap / 2, row * height + gap / 2];
      const box = { x, y, width: width - gap, height: height - gap };
      const full = svg("rect", { ...box, class: "done" });
      return { all, done: 0, full, box: svg("g", {}, svg("rect", { ...box, class: "open" }), full) };
    });
    picture.setAttribute("viewBox", `0 0 ${wide * width} ${high * height}`);
    picture.style.maxWidth = `${wide * width}px`;
    picture.replaceChildren(...boxes.map((one) => one.box));
    known = new Set();
  };

  const set = ({ rows, columns, done }, plan) => {
    const now = `${rows} ${columns} ${plan.tile}`;
    if (drawn !== now || done.length < known.size) build(rows, columns, plan);
    const first = !known.size, wide = Math.ceil(columns / across);
    drawn = now;
    for (const [row, column] of done) {
      const tile = row * columns + column;
      if (known.has(tile)) continue;
      known.add(tile);
      const box = boxes[Math.floor(row / down) * wide + Math.floor(column / across)];
      box.done += 1;
      box.full.style.opacity = box.done === box.all ? 1 : 0.15 + (0.6 * box.done) / box.all;
      box.full.classList.toggle("fresh", !first);
    }
    const grid = `${count(rows, "row")} and ${count(columns, "column")} of tiles, `
      + `each of ${extents(plan.tile[0], plan.tile[1])} elements`;
    const text = planned ? `C in ${grid}`
      : `${spaced(done.length)} of ${count(rows * columns, "tile")} of C finished`;
    picture.setAttribute("aria-label", text);
    const each = across * down > 1 ? ` Each box stands for up to ${extents(down, across)} tiles.` : "";
    setText(note, `C ${planned ? "in" : "has"} ${grid}.${each}`); // the view says how many are finished
    show(legend, !planned && done.length < rows * columns);
    show(partly, across * down > 1);
  };
  return [h("div", {}, picture, legend, note), set];
};
