// The view of a job.
import { call } from "./api.js";
import { Keyed, atMostEvery, h, say, setText, show } from "./dom.js";
import { attempts } from "./attempts.js";
import { Live, newer } from "./live.js";
import { log } from "./log.js";
import { bar, chip, facts, lanes, nothing, problemBox } from "./parts.js";
import { preview } from "./preview.js";
import { report } from "./report.js";
import { tiles } from "./tiles.js";
import {
  ACTIONS, FINAL, STATES, ago, dtypes, duration, extents, left, operandsOf, percent, rate, reason, shape, size, soon, spaced,
  time, title,
} from "./words.js";

const LEAST_MS = 500, TILES_MS = 1000, REFRESH_MS = 5000;

export const jobView = (main, { id, user, onState }) => {
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  document.title = "Job - oocgemm";
  const name = h("h1", { tabindex: -1 }, "Job"), meta = h("p", { class: "meta" }), wrong = h("div");
  const refused = h("p", { role: "alert", class: "bad" });
  const [state, setState] = chip(), actions = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
  const finding = h("p", { class: "finding" }), more = h("p", { class: "meta" });
  const [shown, setShare] = bar("Tiles of C that are finished");
  const [figures, setFigures] = facts("figures"), [grid, setTiles] = tiles(), [busy, setBusy] = lanes();
  const [setup, setSetup] = table(), [history, addEvent] = attempts(), printed = log(id);
  const reported = h("div"), found = h("div");
  const now = h("section", { class: "card" }, h("h2", {}, "Lanes in the last seconds"), busy);
  const verdict = h("section", { class: "card verdict", "aria-label": "State" }, finding, more, shown);
  const parts = [
    verdict, figures, found,
    h("div", { class: "half column" },
      h("section", { class: "card" }, h("h2", {}, "Tiles of C"), grid),
      h("section", { class: "card late" }, h("h2", {}, "Plan"), setup)),
    h("div", { class: "half column" }, now, history, printed.element), reported,
  ];
  main.replaceChildren(
    h("div", {}, h("a", { class: "brow", href: "#/" }, "← Queue"),
      h("div", { class: "top" },
        h("div", { class: "grow" }, h("div", { class: "named" }, name, state), meta), actions),
      refused),
    wrong, ...parts,
  );
  for (const part of parts) show(part, false);
  const button = (action) => h("button",
    { type: "button", class: action === "cancel" && "danger", onclick: () => act(action) }, ACTIONS[action]);
  const again = () => h("a", { class: "button", href: `#/new?verb=${job.verb}&from=${id}` }, "Submit again");
  const make = (action) => [action === "again" ? again() : button(action), () => {}];
  const buttons = new Keyed(actions, (action) => action, make);
  let job = null, closed = false, tilesShown = "", last = 0, ended = false, shownReport = null;

  const drawState = () => {
    const { done, total } = job.progress ?? { done: 0, total: job.plan.tiles[0] * job.plan.tiles[1] };
    verdict.dataset.state = job.state;
    setText(finding, sentence(job));
    setText(more, detail(job));
    show(more, Boolean(more.textContent));
    setShare(done / total, `${spaced(done)} of ${spaced(total)} tiles`);
    setFigures(figuresOf(job, done, total));
    setBusy(job.activity);
    show(now, job.activity !== null);
  };

  const draw = () => {
    document.title = `${title(job)} - oocgemm`;
    setText(name, title(job));
    setText(meta, `${job.owner}\u00a0· submitted ${ago(job.created)}\u00a0· ${job.id}`);
    setState(job.state);
    drawActions();
    setSetup(planOf(job));
    if (parts[0].hidden) for (const part of parts) show(part, part !== reported);
    drawState();
    if (job.result?.preview && !found.firstChild) found.append(preview(job.result.preview));
    show(found, job.state === "succeeded" && Boolean(found.firstChild));
    printed.follow(!FINAL.has(job.state) && job.attempt > 0);
    show(printed.element, job.attempt > 0);
    drawReport();
  };

  const drawActions = () => {
    const may = user.scope === "admin" || (user.scope === "submit" && user.name === job.owner);
    const wanted = Object.keys(ACTIONS).filter((action) => may && job.actions.includes(action));
    const focused = document.activeElement, had = actions.contains(focused);
    buttons.set([...wanted, ...(user.scope === "read" ? [] : ["again"])]);
    if (had && !actions.contains(focused)) name.focus(); // its button is gone
  };

  const act = async (action) => {
    setText(refused, "");
    try {
      update(await call("POST", `${path}/${action}`));
    } catch (problem) {
      setText(refused, problem.message);
    }
  };

  const update = (found) => {
    const before = job?.state;
    if (job && found.version < job.version) return;
    job = { ...found, progress: newer(job?.progress, found.progress) };
    draw();
    if (before && before !== job.state) say(`The job is ${STATES[job.state].toLowerCase()}. ${sentence(job)}`);
    loadTiles();
  };

  const drawReport = () => {
    const has = job.state === "succeeded" && job.result?.verdict !== undefined; // pca has no report
    show(reported, has);
    if (!has || shownReport) return;
    shownReport = report(`${path}/report`);
    reported.append(shownReport.element);
  };

  const loadTiles = atMostEvery(TILES_MS, async () => {
    if (closed || !job) return;
    const key = `${job.attempt} ${job.progress?.done} ${job.state}`;
    if (key === tilesShown) return;
    tilesShown = key;
    try {
      const found = await call("GET", `${path}/tiles`);
      if (closed) return;
      setTiles(found, job.plan);
      job.progress = newer(job.progress, { done: found.done.length, total: found.rows * found.columns });
      drawState();
    } catch { tilesShown = ""; }
  });

  const load = async () => {
    try {
      const found = await call("GET", path);
      if (closed) return;
      wrong.replaceChildren();
      update(found);
    } catch (problem) {
      if (closed || !problem.status) return;
      if (problem.status === 404) {
        live.close();
        main.replaceChildren(nothing("There is no such job", "Its records may have been deleted.",
          h("a", { class: "button", href: "#/" }, "See the queue")));
        main.focus();
      } else wrong.replaceChildren(problemBox(problem));
    }
  };
  const refresh = atMostEvery(LEAST_MS, load);

  // The stream of a job ends with it. Later changes, such as a retry, come from the stream of all jobs.
  const live = new Live(`${path}/events`, {
    onState: (connection) => {
      for (const one of actions.querySelectorAll("button")) one.disabled = connection === "lost";
      onState(connection);
    },
    onOpen: refresh,
    onEvent: (event) => {
      if (event.job !== id) return;
      if (event.kind === "progress" || event.kind === "activity") {
        if (!job) return;
        job[event.kind] = event.kind === "progress" ? newer(job.progress, event.data) : event.data;
        drawState();
        loadTiles();
        return;
      }
      last = Math.max(last, event.seq ?? 0);
      addEvent(event);
      refresh();
      const over = FINAL.has(event.kind) || event.kind === "deleted";
      if (over && !ended) { ended = true; live.move(`/v1/events?after=${last}`); }
    },
  });
  refresh();
  const timer = setInterval(() => { if (!document.hidden && job && !FINAL.has(job.state)) refresh(); }, REFRESH_MS);
  return {
    close: () => {
      closed = true;
      clearInterval(timer);
      refresh.stop();
      loadTiles.stop();
      printed.close();
      shownReport?.close();
      live.close();
    },
  };
};

const sentence = (job) => {
  const where = `on device ${job.device}`;
  switch (job.state) {
    case "queued": return `Waiting ${reason(job)}`;
    case "held": return "Held";
    case "paused": return "Paused";
    case "starting": return `Starting ${where}`;
    case "running": return [`Running ${where}`, left(job)].filter(Boolean).join(": ");
    case "pausing": return "Pausing: finished tiles are kept";
    case "cancelling": return "Cancelling: its process is asked to end";
    case "succeeded":
      return job.result?.seconds ? `Succeeded: product in ${duration(job.result.seconds)}` : "Succeeded";
    case "failed": return "Failed";
    default: return "Cancelled";
  }
};

const detail = (job) => {
  if (job.state === "queued") {
    const start = job.predicted_start ? `Predicted to start ${soon(job.predicted_start)}.` : "";
    return [start, job.error && `The last attempt failed: ${job.error}`].filter(Boolean).join(" ");
  }
  if (job.state === "held") return "It stays in the queue until someone releases it.";
  if (job.state === "paused") return "Finished tiles are kept. It goes on with the others when someone resumes it.";
  if (job.state === "succeeded") return job.result?.verdict ?? "";
  if (job.state === "cancelled") return job.error ?? "Finished tiles are kept. Retry goes on with the others.";
  return job.error ?? "";
};

const figuresOf = (job, done, total) => {
  const ran = job.started ? (job.ended ?? Date.now() / 1000) - job.started : null;
  const pairs = [["Tiles", `${spaced(done)} / ${spaced(total)}`, percent(done / total)]];
  const seconds = job.result?.seconds, predicted = `predicted ${duration(job.predicted_s)}`;
  pairs.push(["Time", ran === null ? "-" : duration(ran), seconds ? `with start-up; product ${predicted}` : predicted]);
  if (seconds) pairs.push(["Rate", rate(job.result.flops / seconds), "flops over the time of the product"]);
  if (job.device_bytes) pairs.push(["Device memory", size(job.device_bytes), "reserved while it runs"]);
  pairs.push(["Host memory", size(job.host_bytes), "reserved while it runs"]);
  pairs.push(["Attempts", String(job.attempt), `${job.failures} of ${job.max_attempts} failures`]);
  return pairs;
};

const planOf = (job) => [
  ["product", `${shape(job.plan)}, ${dtypes(job.plan)}`],
  ...operandsOf(job).map(([name, value]) => [name.length > 1 ? name : name.toUpperCase(),
    typeof value === "string" ? value : JSON.stringify(value)]),
  ["result", job.c ?? job.out],
  ["in Python", callOf(job)],
  ["tile", `${extents(job.plan.tile[0], job.plan.tile[1])}, panels ${spaced(job.plan.tile[2])} deep`],
  ["grid", `${extents(...job.plan.tiles)} tiles`],
  ...Object.entries(job.options).filter(([option]) => option !== "tile").map(optionOf),
  ["disk space", size(job.disk_bytes)],
  ["priority", String(job.priority)],
  ...(job.deadline ? [["deadline", time(job.deadline)]] : []),
  ...(job.needs.length ? [["needs", job.needs.join(" ")]] : []),
];

// Returns the call that repeats a job: its arguments are the JSON of the job, as Python writes it.
const callOf = (job) => {
  const python = (value) => {
    if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
    if (value === null || typeof value === "boolean") return { true: "True", false: "False", null: "None" }[value];
    if (typeof value !== "object") return JSON.stringify(value);
    return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  };
  const out = job.verb === "gemm" ? ["c", job.c] : ["out", job.out];
  const given = [...operandsOf(job), out, ...Object.entries(job.options)];
  return `oocgemm.Client().${job.verb}(${given.map(([name, value]) => `${name}=${python(value)}`).join(", ")})`;
};

const optionOf = ([name, value]) =>
  [name.replaceAll("_", " "), name.endsWith("_memory") && typeof value === "number" ? size(value) : String(value)];

// Returns a table of names and values, and the function that sets it.
const table = () => {
  const body = h("tbody");
  let before = "";
  return [h("table", { class: "setup" }, body), (pairs) => {
    const text = JSON.stringify(pairs);
    if (text === before) return;
    before = text;
    const line = ([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value));
    body.replaceChildren(...pairs.map(line));
  }];
};
