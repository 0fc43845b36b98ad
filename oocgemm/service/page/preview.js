// What a job shows of its result: the corners of arrays, a thumbnail of a matrix, and singular values as bars.
import { h, svg } from "./dom.js";
import { extents } from "./words.js";

const SIDE = 180, HEIGHT = 90;

export const preview = ({ arrays, thumbnail, values }) => h("section", { class: "card preview", "aria-label": "Result" },
  h("h2", {}, "Result"),
  h("div", { class: "shown" }, thumbnail && picture(thumbnail), values?.length > 1 && bars(values),
    Object.entries(arrays).map(([name, array]) => corner(name, array))));

const corner = (name, { shape, rows }) => {
  const cut = shape.length > 1 ? shape[0] > rows.length || shape[1] > (rows[0]?.length ?? 0) : shape[0] > (rows[0]?.length ?? 0);
  const line = (row) => h("tr", {}, row.map((each) => h("td", {}, String(each))));
  return h("figure", {}, h("figcaption", {}, `${name || "elements"}, ${extents(...shape)}${cut ? ": the first" : ""}`),
    h("div", { class: "scroll" }, h("table", { class: "corner" }, h("tbody", {}, rows.map(line)))));
};

const picture = ({ columns, least, most, pixels }) => {
  const levels = Uint8Array.from(atob(pixels), (each) => each.charCodeAt(0)), rows = levels.length / columns;
  const cells = [...levels].map((level, at) => svg("rect", {
    x: at % columns, y: Math.floor(at / columns), width: 1.02, height: 1.02, class: "pixel", "fill-opacity": level / 255,
  }));
  const text = `The first ${extents(rows, columns)} elements, from ${shorter(least)} to ${shorter(most)}`;
  const height = Math.min(SIDE, (SIDE * rows) / columns);
  return h("figure", {}, h("figcaption", {}, text),
    svg("svg", { viewBox: `0 0 ${columns} ${rows}`, width: (height * columns) / rows, height, role: "img", "aria-label": text }, cells));
};

const bars = (values) => {
  const most = Math.max(...values), width = 100 / values.length;
  const one = (value, at) => svg("rect", {
    x: at * width, y: HEIGHT * (1 - value / most), width: width * 0.8, height: (HEIGHT * value) / most, class: "pixel",
  });
  const text = `Singular values, from ${shorter(values[0])} to ${shorter(values.at(-1))}`;
  return h("figure", {}, h("figcaption", {}, text), svg("svg", {
    viewBox: `0 0 100 ${HEIGHT}`, width: 200, height: HEIGHT, preserveAspectRatio: "none", role: "img", "aria-label": text,
  }, values.map(one)));
};
const shorter = (number) => String(Number(number.toPrecision(4)));
