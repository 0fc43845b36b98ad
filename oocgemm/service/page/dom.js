// Makes and changes elements. Data enters the page only as text, never as HTML.

// Returns an element. Properties that start with "on" are listeners; null, undefined and false are left out.
export const h = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

const fill = (element, properties, children) => {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

// Changes a text only if it differs, so that screen readers do not repeat it and selections stay.
export const setText = (element, text) => { if (element.textContent !== text) element.textContent = text; };
export const show = (element, shown) => { element.hidden = !shown; };

// Gives a bar or a box its share of the width. The content security policy forbids style attributes, but not this call.
export const setWidth = (element, share) => { element.style.width = `${100 * Math.min(1, Math.max(0, share))}%`; };

// Keeps one child of an element per item, in the order of the items. Children of items that stay are kept, with their
// focus. `make` returns an element and the function that updates it, as [element, update].
export class Keyed {
  constructor(element, key, make) { Object.assign(this, { element, key, make, known: new Map() }); }
  set(items) {
    const focused = document.activeElement, keys = new Set(items.map(this.key));
    for (const [key, [child]] of this.known) if (!keys.has(key)) { child.remove(); this.known.delete(key); }
    items.forEach((item, place) => {
      const key = this.key(item);
      if (!this.known.has(key)) this.known.set(key, this.make(item));
      const [child, update] = this.known.get(key);
      update(item);
      const there = this.element.children[place] ?? null;
      if (there !== child) this.element.insertBefore(child, there);
    });
    if (focused !== document.activeElement && this.element.contains(focused)) focused.focus({ preventScroll: true });
  }
}

// Says something to users of screen readers.
export const say = (text) => { document.getElementById("said").textContent = text; };

// Returns a function that calls `action` at most once in this time: at once if that is allowed, else later.
export const atMostEvery = (milliseconds, action) => {
  let timer = 0, last = -Infinity;
  const run = () => { timer = 0; last = performance.now(); action(); };
  const call = () => {
    if (timer) return;
    const left = last + milliseconds - performance.now();
    if (left <= 0) run(); else timer = setTimeout(run, left);
  };
  call.stop = () => { clearTimeout(timer); timer = 0; };
  return call;
};
