// The view of the queue: devices, and running, waiting and finished jobs.
import { call } from "./api.js";
import { devices } from "./devices.js";
import { Keyed, atMostEvery, h, setText, show } from "./dom.js";
import { Live, newer } from "./live.js";
import { bar, chip, nothing, problemBox } from "./parts.js";
import {
  ACTIVE, FINAL, ago, count, duration, left, percent, reason, shape, soon, spaced, stamp, time, title,
} from "./words.js";

const WAITING = 100, FINISHED = 10;
// Reasons and predicted starts change without an event.
const REFRESH_MS = 5000, LEAST_MS = 500;

export const queueView = (main, { onState }) => {
  document.title = "Queue - oocgemm";
  const [cards, setCards] = devices(), counts = h("p", { class: "meta" });
  const tables = {
    active: table("Running", ["Job", "State", "Progress", "Owner", "Priority", "Device"], activeRow),
    waiting: table("Waiting", ["Job", "State", "Waits", "Starts", "Owner", "Priority"], waitingRow),
    finished: table("Finished", ["Job", "State", "Took", "Ended", "Owner"], finishedRow),
  };
  const older = h("button", { type: "button", onclick: () => loadFinished(true) }, "Show older jobs");
  tables.finished.element.append(older);
  const draining = h("p", { class: "card notice" },
    "The service is draining: running jobs go on, and no others start.");
  const empty = nothing("No jobs yet", "Submit a product of two matrices, and follow it here.",
    h("a", { class: "primary", href: "#/new" }, "New job"));
  const wrong = h("div");
  main.replaceChildren(
    h("div", { class: "top" }, h("div", {}, h("h1", { tabindex: -1 }, "Queue"), counts),
      h("a", { class: "primary", href: "#/new" }, "New job")),
    wrong, draining, h("h2", { class: "unseen" }, "Devices"), cards, empty,
    tables.active.element, tables.waiting.element, tables.finished.element,
  );
  for (const part of [draining, empty, cards, ...Object.values(tables).map((one) => one.element)]) show(part, false);

  let queue = null, machine = null, finished = [], next = null, closed = false, stale = true;

  const draw = () => {
    if (!queue || !machine) return;
    setCards(machine, queue.active);
    setText(counts, summary(queue.counts));
    show(cards, true);
    show(draining, machine.draining);
    tables.active.set(queue.active);
    tables.waiting.set(queue.waiting, waitingCount(queue.counts));
    tables.finished.set(finished);
    show(older, next !== null);
    show(empty, !queue.active.length && !queue.waiting.length && !finished.length);
  };

  const active = (id) => queue?.active.find((job) => job.id === id);

  const loadFinished = async (more = false) => {
    const states = [...FINAL].map((state) => `state=${state}`).join("&");
    const limit = Math.min(1000, more ? FINISHED : Math.max(FINISHED, finished.length));
    const found = await call("GET", `/v1/jobs?${states}&limit=${limit}${more ? `&cursor=${next}` : ""}`);
    finished = more ? [...finished, ...found.jobs] : found.jobs;
    next = found.next;
    if (more) draw();
  };

  const load = async () => {
    const all = stale;
    stale = false;
    try {
      let found;
      [found, machine] = await Promise.all([
        call("GET", `/v1/queue?limit=${WAITING}`), call("GET", "/v1/devices"), all ? loadFinished() : null,
      ]);
      if (closed) return;
      for (const job of found.active) job.progress = newer(active(job.id)?.progress, job.progress);
      queue = found;
      wrong.replaceChildren();
      draw();
    } catch (problem) {
      stale ||= all;
      if (!closed && problem.status > 0) wrong.replaceChildren(problemBox(problem));
    }
  };
  const refresh = atMostEvery(LEAST_MS, load);

  const live = new Live("/v1/events", {
    onState,
    onOpen: () => { stale = true; refresh(); },
    onEvent: (event) => {
      if (event.kind === "progress" || event.kind === "activity") {
        const job = active(event.job);
        if (!job) return;
        job[event.kind] = event.kind === "progress" ? newer(job.progress, event.data) : event.data;
        draw();
        return;
      }
      if (FINAL.has(event.kind) || event.kind === "deleted" || event.kind === "queued") stale = true;
      refresh();
    },
  });
  refresh();
  const timer = setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
  return { close: () => { closed = true; clearInterval(timer); refresh.stop(); live.close(); } };
};

const waitingCount = (counts) => counts.queued + counts.held + counts.paused;
const summary = (counts) => {
  const active = [...ACTIVE].reduce((sum, state) => sum + counts[state], 0);
  const ended = [...FINAL].reduce((sum, state) => sum + counts[state], 0);
  const parts = [[active, "running"], [waitingCount(counts), "waiting"], [ended, "finished"]];
  return parts.map(([number, word]) => `${spaced(number)} ${word}`).join("\u00a0· ");
};

// Returns a section with a table of jobs. Roles are given, since small screens do not display it as a table.
const table = (heading, columns, row) => {
  const body = h("tbody", { role: "rowgroup" }), rows = new Keyed(body, (job) => job.id, () => row(columns));
  const number = h("span", { class: "meta" }), note = h("p", { class: "note" }), id = `table-${heading.toLowerCase()}`;
  const head = h("tr", { role: "row" }, columns.map((name) => h("th", { role: "columnheader", scope: "col" }, name)));
  const element = h("section", { class: "card jobs", "aria-labelledby": id },
    h("h2", { id }, `${heading} `, number),
    h("table", { role: "table", class: heading.toLowerCase(), "aria-labelledby": id },
      h("thead", { role: "rowgroup" }, head), body),
    note);
  return {
    element,
    set(jobs, all = jobs.length) {
      show(element, jobs.length > 0);
      setText(number, heading === "Finished" ? "" : spaced(all));
      setText(note, `${count(all - jobs.length, "more job waits", "more jobs wait")} behind these.`);
      show(note, all > jobs.length);
      rows.set(jobs);
    },
  };
};

const cells = (columns, ...contents) => h("tr", { role: "row" }, contents.map((content, place) =>
  h("td", { role: "cell", "data-label": columns[place], class: columns[place].toLowerCase() }, content)));

const named = () => {
  const link = h("a", { class: "title" }), what = h("small");
  return [[link, what], (job) => {
    link.href = `#/jobs/${job.id}`;
    setText(link, title(job));
    setText(what, `${shape(job.plan)} ${job.plan.a_dtype}`);
  }];
};

const activeRow = (columns) => {
  const [name, setName] = named(), [state, setState] = chip(), [shown, setShare] = bar("Tiles of C that are finished");
  const text = h("small"), owner = h("span"), priority = h("span"), device = h("span");
  return [cells(columns, name, state, [shown, text], owner, priority, device), (job) => {
    const { done, total } = job.progress ?? { done: 0, total: 1 };
    setName(job);
    setState(job.state);
    setShare(done / total, `${spaced(done)} of ${spaced(total)} tiles`);
    setText(text, [percent(done / total), left(job)].filter(Boolean).join(", "));
    setText(owner, job.owner);
    setText(priority, String(job.priority));
    setText(device, String(job.device ?? ""));
  }];
};

const LATER = { held: "when released", paused: "when resumed" };

const waitingRow = (columns) => {
  const [name, setName] = named(), [state, setState] = chip(), starts = h("span"), why = h("span");
  const owner = h("span"), priority = h("span");
  return [cells(columns, name, state, why, starts, owner, priority), (job) => {
    setName(job);
    setState(job.state);
    setText(why, reason(job));
    setText(starts, job.predicted_start ? soon(job.predicted_start) : (LATER[job.state] ?? "not known"));
    setText(owner, job.owner);
    setText(priority, String(job.priority));
  }];
};

const finishedRow = (columns) => {
  const [name, setName] = named(), [state, setState] = chip(), took = h("span"), ended = h("time"), owner = h("span");
  return [cells(columns, name, state, took, ended, owner), (job) => {
    setName(job);
    setState(job.state);
    setText(took, job.started && job.ended ? duration(job.ended - job.started) : "did not run");
    setText(ended, ago(job.ended));
    ended.title = time(job.ended);
    stamp(ended, job.ended);
    setText(owner, job.owner);
  }];
};
