// The form for a new job, with a dry run of it that is kept up to date.
import { call } from "./api.js";
import { h, say, setText, show } from "./dom.js";
import { NAMES, formOf, messageOf } from "./fields.js";
import { facts } from "./parts.js";
import { tiles } from "./tiles.js";
import { dtypes, duration, extents, rate, shape, size, soon } from "./words.js";

const PAUSE_MS = 400, REFRESH_MS = 60_000;
const EXISTS = "C is unfinished: the job goes on with it. If A, B or options have changed since, it fails. "
  + "To compute all of C anew, tick Replace C.";

export const formView = (main, { from, verb: asked_verb }) => {
  document.title = "New job - oocgemm";
  const verb = NAMES.includes(asked_verb) ? asked_verb : "gemm";
  const { groups, more: further, fields: all, bodyOf, textsOf, fieldsOf } = formOf(verb);
  const inputs = new Map(), errors = new Map();
  const lists = { all: h("datalist", { id: "roots" }), writable: h("datalist", { id: "roots-rw" }) };
  const rows = (fields) => h("div", { class: "fields" }, fields.map((field) => row(field, inputs, errors)));
  const more = h("details", { class: "card" }, h("summary", {}, "More options"), rows(further));
  const roots = h("p", { class: "note" }), prediction = dryRun(all);
  const button = h("button", { class: "primary" }, "Submit job"), wrong = h("p", { class: "bad", role: "alert" });
  const group = ([heading, fields]) => h("fieldset", { class: "card" },
    h("legend", {}, heading), rows(fields), heading === groups[0][0] && roots);
  const onsubmit = (event) => { event.preventDefault(); submit(); };
  const form = h("form", { class: "new", oninput: () => changed(), onsubmit },
    h("div", { class: "inputs" }, groups.map(group), more),
    h("div", { class: "side" },
      h("aside", { class: "card dry", "aria-label": "Dry run" }, h("h2", {}, "Dry run"), prediction.element),
      h("div", { class: "card sending" }, wrong, button)),
    lists.all, lists.writable);
  const what = `${verb === "gemm" ? "A product C = A × B" : `The result of oocgemm.${verb}`} of arrays beneath the `
    + "roots of the service. Nothing is submitted before you press the button.";
  const choice = h("select", { id: "verb", onchange: () => { location.hash = `#/new?verb=${choice.value}`; } },
    NAMES.map((name) => h("option", { value: name, selected: name === verb }, name)));
  main.replaceChildren(
    h("div", {}, h("a", { class: "brow", href: "#/" }, "← Queue"), h("h1", { tabindex: -1 }, "New job"),
      h("p", { class: "meta" }, what), h("p", { class: "verbs" }, h("label", { for: "verb" }, "Verb "), choice)),
    form,
  );

  let timer = 0, asked = null, closed = false, sending = false, sent = { text: "", key: "" };
  const texts = () => Object.fromEntries(all.map(({ name }) => {
    const input = inputs.get(name);
    return [name, input.type === "checkbox" ? (input.checked ? "on" : "") : input.value.trim()];
  }));

  const changed = (pause = PAUSE_MS) => {
    clearTimeout(timer);
    setText(wrong, "");
    timer = setTimeout(() => plan(), pause);
  };

  // `quiet` is set if nothing has been changed.
  const plan = async (quiet = false) => {
    clearTimeout(timer);
    asked?.abort();
    asked = new AbortController();
    const now = texts(), mine = asked;
    const missing = all.filter(({ name, required }) => required && !now[name]).map(({ label }) => label);
    if (missing.length) { mark([], null); prediction.missing(missing); return; }
    if (!quiet) prediction.busy();
    try {
      const found = await call("POST", "/v1/jobs?dry_run=1", { body: bodyOf(now), signal: mine.signal });
      if (closed || mine !== asked) return;
      mark([], null);
      prediction.planned(found, quiet);
    } catch (problem) {
      if (closed || problem.name === "AbortError" || mine !== asked) return;
      refuse(problem, now);
    }
    // Predicted starts change while others submit. After a problem, ask again only when the form changes.
    const refused = prediction.element.dataset.state === "refused";
    if (!closed && !refused) timer = setTimeout(() => { if (!document.hidden) plan(true); }, REFRESH_MS);
  };

  const refuse = (problem, now) => {
    const names = fieldsOf(problem, now);
    mark(names, problem);
    if (names.some((name) => further.some((field) => field.name === name))) more.open = true;
    prediction.refused(problem, names, (name) => inputs.get(name).focus(), useSmallest);
  };
  const mark = (names, problem) => {
    for (const [name, error] of errors) {
      const bad = names.includes(name);
      setText(error, bad && names.length === 1 ? messageOf(problem) : ""); // of several fields, the dry run says it
      if (bad) inputs.get(name).setAttribute("aria-invalid", "true");
      else inputs.get(name).removeAttribute("aria-invalid");
    }
  };
  const useSmallest = (smallest) => {
    for (const [name, bytes] of Object.entries(smallest)) {
      if (inputs.get(name).value.trim()) inputs.get(name).value = `${Math.ceil(bytes / 2 ** 20)}MiB`;
    }
    changed(0);
  };

  // The key lets the service recognise a request that is sent again because its answer was lost. Another request has
  // another key.
  const keyOf = (text) => {
    if (sent.text !== text) {
      const bytes = crypto.getRandomValues(new Uint8Array(16));
      sent = { text, key: [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("") };
    }
    return sent.key;
  };
  const submit = async () => {
    if (sending) return;
    sending = true;
    setText(wrong, "");
    setText(button, "Submitting…");
    const now = texts(), body = bodyOf(now);
    try {
      const job = await call("POST", "/v1/jobs", { body, headers: { "Idempotency-Key": keyOf(JSON.stringify(body)) } });
      say("The job is submitted.");
      location.hash = `#/jobs/${job.id}`;
    } catch (problem) {
      if (closed) return;
      refuse(problem, now);
      setText(wrong, problem.status ? "Not submitted."
        : "No answer has come. Press the button again: the job will not be submitted twice.");
      const [name] = fieldsOf(problem, now);
      if (name) inputs.get(name).focus();
    } finally {
      sending = false;
      setText(button, "Submit job");
    }
  };

  const start = async () => {
    const earlier = from ? call("GET", `/v1/jobs/${encodeURIComponent(from)}`) : null;
    const [found, job] = await Promise.all([call("GET", "/v1/roots"), earlier]);
    if (closed) return;
    if (job && job.verb !== verb) { location.replace(`#/new?verb=${job.verb}&from=${from}`); return; }
    const option = ({ name }) => h("option", { value: `${name}:` });
    lists.all.append(...found.roots.map(option));
    lists.writable.append(...found.roots.filter((root) => root.writable).map(option));
    const described = ({ name, writable }) => `${name} (${writable ? "read and write" : "read only"})`;
    setText(roots, `Roots: ${found.roots.map(described).join(", ")}.`);
    if (job) for (const [name, text] of Object.entries(textsOf(job))) {
      const input = inputs.get(name);
      if (input?.type === "checkbox") input.checked = text !== ""; else if (input) input.value = text;
    }
    plan();
  };
  start().catch((problem) => { if (!closed) prediction.refused(problem, [], () => {}); });
  return { close: () => { closed = true; clearTimeout(timer); asked?.abort(); } };
};

const row = ({ name, label, help, kind = "text", place, root, required }, inputs, errors) => {
  const id = `field-${name}`, error = h("p", { class: "bad", id: `${id}-error`, "aria-live": "polite" });
  const described = `${id}-help ${id}-error`;
  const shared = { id, name, required: Boolean(required), "aria-describedby": described, autocomplete: "off" };
  const input = Array.isArray(kind) ? h("select", shared, kind.map(([value, text]) => h("option", { value }, text)))
    : kind === "check" ? h("input", { ...shared, type: "checkbox" })
    : h("input", {
      ...shared, type: kind === "time" ? "datetime-local" : "text", inputmode: kind === "number" ? "numeric" : null,
      placeholder: place, spellcheck: "false", autocapitalize: "off",
      list: { all: "roots", rw: "roots-rw" }[root],
    });
  inputs.set(name, input);
  errors.set(name, error);
  const what = h("span", { class: "note", id: `${id}-help` }, help ?? "");
  const named = h("label", { for: id }, label), order = kind === "check" ? [input, named] : [named, input];
  return h("div", { class: kind === "check" ? "field check" : "field", "data-field": name }, order, what, error);
};

// The dry run: what is missing, the plan, or why the service refuses the job.
const dryRun = (fields) => {
  const said = h("div", { "aria-live": "polite" }), [plan, setPlan] = facts("facts plan");
  const [grid, setGrid] = tiles({ planned: true }), planning = h("p", { class: "meta" }, "Planning…");
  const element = h("div", {}, planning, said, plan, grid);
  const set = (state, ...children) => {
    element.dataset.state = state;
    said.replaceChildren(...children.filter(Boolean));
    for (const part of [plan, grid]) show(part, state === "planned");
    show(planning, state === "busy");
  };
  set("missing");
  return {
    element,
    missing: (names) => {
      set("missing", h("p", { class: "meta" }, `Name ${list(names)} to see the plan, the time and the start.`));
    },
    // The previous plan is shown until there is a new one.
    busy: () => (element.dataset.state === "planned" ? show(planning, true) : set("busy")),
    planned: (found, quiet) => {
      said.setAttribute("aria-live", quiet ? "off" : "polite");
      const start = found.predicted_start ? `starts ${soon(found.predicted_start)}` : "its start is not known";
      set("planned", h("p", { class: "finding" }, `Takes about ${duration(found.predicted_s)}, ${start}`),
        found.plan.c_exists && h("p", {}, EXISTS));
      setPlan([
        ["Product", shape(found.plan), dtypes(found.plan)],
        ["Rate", rate(found.plan.flops / Math.max(1e-9, found.predicted_s))],
        ...(found.device_bytes ? [["Device memory", size(found.device_bytes)]] : []),
        ["Host memory", size(found.host_bytes)], ["Disk space", size(found.disk_bytes)],
        ["Tile", extents(...found.plan.tile)],
      ]);
      setGrid({ rows: found.plan.tiles[0], columns: found.plan.tiles[1], done: [] }, found.plan);
    },
    refused: (problem, names, go, use) => {
      said.setAttribute("aria-live", "polite");
      const { smallest } = problem.body ?? {};
      const button = (text, onclick) => h("button", { type: "button", onclick }, text);
      const label = (name) => fields.find((field) => field.name === name).label;
      // A message about one field is beside that field.
      set("refused", h("p", { class: "finding" }, names.length === 1 ? problem.title : messageOf(problem)),
        h("div", { class: "actions" }, names.map((name) => button(`Go to ${label(name)}`, () => go(name))),
          smallest && button("Use the smallest budget", () => use(smallest))));
    },
  };
};
const list = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);
