// Numbers with units, formatted as in the tables of the page.
const scaled = (value, units, base) => {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i < units.length - 1) { value /= base; i += 1; }
  return `${value >= 1000 ? value.toFixed(0) : Number(value.toPrecision(3))} ${units[i]}`;
};
const formatTime = (ns) => ns === 0 ? "0 s" : scaled(ns, ["ns", "µs", "ms", "s"], 1000);
const formatSize = (bytes) => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const formatRate = (amount, ns, unit) =>
  scaled(ns ? (amount / ns) * 1e9 : 0, ["", "k", "M", "G", "T", "P"].map((p) => `${p}${unit}/s`), 1000);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Distance between axis marks: the smallest of 1, 2 or 5 times a power of ten that is at least `minimum`.
const niceStep = (minimum) => {
  const power = 10 ** Math.floor(Math.log10(minimum));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= minimum * 0.9999);
};

// Returns black or white, whichever is easier to read on a colour that is drawn over another one (WCAG 2 contrast).
function readableOn(over, under, opacity) {
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const below = parts(under);
  const [r, g, b] = parts(over).map((v, i) => linear(opacity * v + (1 - opacity) * below[i]));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
