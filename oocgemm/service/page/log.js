// What the processes of a job have printed.
import { tail } from "./api.js";
import { h, setText, show } from "./dom.js";

const MOST = 65536, KEEP = 200_000, EVERY_MS = 1000;

export const log = (id) => {
  const text = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": "Log", "aria-live": "off" });
  const note = h("p", { class: "meta" }, "The job has printed nothing.");
  const whole = h("a", { href: `/v1/jobs/${id}/log`, target: "_blank", rel: "noopener" }, "Whole log");
  const decoder = new TextDecoder(), element = h("section", { class: "card" },
    h("div", { class: "between" }, h("h2", {}, "Log"), whole), note, text);
  let end = 0, timer = 0, closed = false, following = false, reading = false, again = false;
  show(text, false);
  show(whole, false);

  const read = async () => {
    const found = await tail(`/v1/jobs/${id}/log`, end, MOST);
    if (closed) return 0;
    end = found.end;
    if (!found.bytes.length) return 0;
    const below = text.scrollHeight - text.scrollTop - text.clientHeight < 40 || text.hidden;
    // Remove control characters except new lines and tabs: they would show as boxes.
    const more = decoder.decode(found.bytes, { stream: true }).replace(/\x1b\[[0-9;]*[A-Za-z]|[^\P{Cc}\n\t]/gu, "");
    setText(text, (text.textContent + more).slice(-KEEP));
    show(text, true);
    show(whole, true);
    show(note, false);
    if (below) text.scrollTop = text.scrollHeight;
    return found.bytes.length;
  };
  const step = async () => {
    if (reading) { again = true; return; }
    reading = true;
    try {
      do again = false; while (!document.hidden && ((await read()) >= MOST || again));
    } catch { /* the view says that the service cannot be reached */ }
    reading = false;
    clearTimeout(timer);
    if (following && !closed) timer = setTimeout(step, EVERY_MS);
  };
  return {
    element,
    // Reads what is new, and while the job is active, reads again later.
    follow(active) {
      following = active;
      step();
    },
    close() { closed = true; clearTimeout(timer); },
  };
};
