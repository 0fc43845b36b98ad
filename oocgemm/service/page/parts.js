// Parts that several views have: the state of a job, bars, lanes, facts, problems.
import { h, setText, setWidth, show } from "./dom.js";
import { STATES, percent } from "./words.js";

// Returns a mark with the state of a job in words, and the function that updates it.
export const chip = () => {
  const element = h("span", { class: "chip" });
  return [element, (state) => {
    element.dataset.state = state;
    setText(element, STATES[state] ?? state);
  }];
};

// Returns a bar that shows a share of something, and the function that updates it.
export const bar = (label, role = "progressbar") => {
  const part = h("b");
  const element = h("div", { class: "bar", role, "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, part);
  return [element, (share, text) => {
    setWidth(part, share);
    element.setAttribute("aria-valuenow", Math.floor(100 * share));
    if (text) element.setAttribute("aria-valuetext", text);
  }];
};

// The lanes in the order of data flow.
const LANES = ["read", "decode", "h2d", "prepare", "compute", "d2h", "encode", "write"];

// Returns a list of lanes with the share of time in which each was busy, and what limited the job.
export const lanes = () => {
  const list = h("ul", { class: "busy", "aria-label": "Lanes, and how busy they are" });
  const limit = h("p", { class: "limit" });
  const known = new Map();
  return [h("div", {}, list, limit), (activity) => {
    const idle = Object.fromEntries([...known.keys()].map((name) => [name, 0]));
    for (const [name, share] of Object.entries({ ...idle, ...activity?.busy })) {
      if (!known.has(name)) {
        const [shown, set] = bar(name, "meter"), value = h("span", { class: "n" });
        const line = h("li", { class: `lane-${name}`, "data-lane": name }, h("span", {}, name), shown, value);
        const after = [...list.children].find((other) => LANES.indexOf(other.dataset.lane) > LANES.indexOf(name));
        list.insertBefore(line, after ?? null);
        known.set(name, (part) => { set(part, percent(part)); setText(value, percent(part)); });
      }
      known.get(name)(share);
    }
    setText(limit, activity?.limit ? sentence(activity.limit) : "");
    show(limit, Boolean(activity?.limit));
  }];
};
const sentence = (text) => text[0].toUpperCase() + text.slice(1);

// Returns a list of names with values, and the function that updates it with [name, value] pairs.
export const facts = (kind = "facts") => {
  const element = h("dl", { class: kind }), known = new Map();
  return [element, (pairs) => {
    for (const [name, [box]] of known) {
      if (!pairs.some(([other]) => other === name)) { box.remove(); known.delete(name); }
    }
    for (const [name, value, what] of pairs) {
      if (!known.has(name)) {
        const shown = h("dd"), more = h("dd", { class: "what" }), box = h("div", {}, h("dt", {}, name), shown, more);
        known.set(name, [box, shown, more]);
        element.append(box);
      }
      const [, shown, more] = known.get(name);
      setText(shown, value);
      setText(more, what ?? "");
    }
  }];
};

// Returns a box that says what is wrong.
export const problemBox = (problem, ...children) => h("div", { class: "card problem" },
  h("p", { class: "finding" }, problem.title), h("p", {}, problem.message), ...children);

// Returns a box for an empty place, such as a list without jobs.
export const nothing = (heading, text, ...children) => h("div", { class: "card nothing" },
  h("p", { class: "finding" }, heading), h("p", { class: "meta" }, text), ...children);
