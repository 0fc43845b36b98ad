// The tiles of C: a grid whose squares fill as tiles are finished. Of a larger grid, a square stands for several tiles,
// and is filled by the share of them that is finished.
import { h, setText, svg } from "./dom.js";
import { count } from "./words.js";

const MAX_COLUMNS = 64, MAX_ROWS = 48, GAP = 0.08;

// Returns the grid, and the function that updates it. That of a plan has no tiles that are finished.
export const tiles = ({ planned = false } = {}) => {
  const picture = svg("svg", { role: "img", class: "tiles" }), note = h("p", { class: "note" });
  let squares = [], across = 0, down = 0, known = new Set(), drawn = "";

  const build = (rows, columns) => {
    [across, down] = [Math.ceil(columns / MAX_COLUMNS), Math.ceil(rows / MAX_ROWS)];
    const [wide, high] = [Math.ceil(columns / across), Math.ceil(rows / down)];
    squares = Array.from({ length: wide * high }, (_, place) => {
      const column = place % wide, row = Math.floor(place / wide);
      const all = Math.min(across, columns - column * across) * Math.min(down, rows - row * down);
      const box = { x: column + GAP / 2, y: row + GAP / 2, width: 1 - GAP, height: 1 - GAP };
      const full = svg("rect", { ...box, class: "done" });
      return { all, done: 0, full, box: svg("g", {}, svg("rect", { ...box, class: "open" }), full) };
    });
    picture.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    // A square has at most 40 pixels a side, and at least what MAX squares leave of the width.
    picture.style.maxWidth = `${Math.min(40 * wide, (420 * wide) / high)}px`;
    picture.replaceChildren(...squares.map((square) => square.box));
    known = new Set();
  };

  const set = ({ rows, columns, done }, plan) => {
    if (drawn !== `${rows} ${columns}` || done.length < known.size) build(rows, columns);
    const first = !known.size, wide = Math.ceil(columns / across);
    drawn = `${rows} ${columns}`;
    for (const [row, column] of done) {
      const tile = row * columns + column;
      if (known.has(tile)) continue;
      known.add(tile);
      const square = squares[Math.floor(row / down) * wide + Math.floor(column / across)];
      square.done += 1;
      square.full.style.opacity = square.done === square.all ? 1 : 0.15 + (0.6 * square.done) / square.all;
      square.full.classList.toggle("fresh", !first);
    }
    const grid = `${count(rows, "row")} and ${count(columns, "column")} of tiles, `
      + `each of ${plan.tile[0]} × ${plan.tile[1]} elements`;
    const text = planned ? `C in ${grid}`
      : `${done.length.toLocaleString("en")} of ${count(rows * columns, "tile")} of C finished`;
    picture.setAttribute("aria-label", text);
    const each = across * down > 1 ? ` Each square stands for up to ${down} × ${across} tiles.` : "";
    setText(note, `C ${planned ? "in" : "has"} ${grid}.${each}`); // the view says how many are finished
  };
  return [h("div", {}, picture, note), set];
};
