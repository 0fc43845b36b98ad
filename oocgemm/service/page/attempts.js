// What has happened to a job, with its attempts.
import { Keyed, h, setText } from "./dom.js";
import { stamp, time } from "./words.js";

// Returns the section, and a function that adds an event to it, unless the section has the event already.
export const attempts = () => {
  const list = h("ol", { class: "history" }), known = new Map();
  const lines = new Keyed(list, (event) => event.seq, line);
  return [h("section", { class: "card" }, h("h2", {}, "Attempts"), list), (event) => {
    if (!event.seq || known.has(event.seq)) return;
    known.set(event.seq, event);
    const sorted = [...known.values()].sort((a, b) => a.seq - b.seq);
    lines.set(sorted.map((one, place) => ({ ...one, before: sorted[place - 1] })));
  }];
};

const line = (event) => {
  const at = h("time"), what = h("span");
  stamp(at, event.at);
  return [h("li", { "data-kind": event.kind }, at, what), (one) => {
    setText(at, time(one.at));
    setText(what, words(one));
  }];
};

const QUEUED = { held: "Released", paused: "Resumed", failed: "Retried", cancelled: "Retried" };
const change = ([name, value]) => `${name.replaceAll("_", " ")} ${value ?? "none"}`;

const words = ({ kind, data, before }) => {
  if (kind === "starting") return `Attempt ${data.attempt} starts on device ${data.device}`;
  if (kind === "queued" && !before) return `Submitted by ${data.owner}`;
  if (kind === "held" && !before) return `Submitted by ${data.owner}, held`;
  if (kind === "queued" && data.error) return `The attempt failed: ${data.error}. It will be tried again.`;
  if (kind === "failed") return data.error ? `Failed: ${data.error}` : "Failed";
  if (kind === "updated") return `Changed: ${Object.entries(data).map(change).join(", ")}`;
  if (kind === "queued") return QUEUED[before.kind] ?? "Queued again";
  return {
    running: "Running", held: "Held", pausing: "Asked to pause", paused: "Paused", cancelling: "Asked to end",
    cancelled: "Cancelled", succeeded: "Succeeded",
  }[kind] ?? kind;
};
