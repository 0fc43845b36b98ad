// Events of the service, over one connection that is made again whenever it breaks.
//
// Browsers allow six connections to a server, over all their tabs. So a view has one stream of events, and a hidden
// tab has no stream.
import { call } from "./api.js";

const KINDS = [
  "queued", "held", "starting", "running", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled",
  "updated", "deleted", "progress", "activity",
];
const RETRY_SECONDS = [1, 2, 4, 8];

// Returns how many tiles of C a job has written. The service never counts fewer tiles than before. Its answers and
// events come over several connections and overtake each other, so the larger count is the newer one.
export const newer = (before, now) => (before && before.done > (now?.done ?? 0) ? before : now);

export class Live {
  // `path` is the path of the stream. `onEvent` is called with each event, `onOpen` after each connection, so that the
  // view loads what it has missed. `onState` is called with "connecting", "live" or "lost"; with null at the end.
  constructor(path, { onEvent, onOpen, onState }) {
    Object.assign(this, { path, onEvent, onOpen, onState, failures: 0, timer: 0, last: 0, ended: false });
    this.onVisible = () => (document.hidden ? this.stop() : this.start());
    document.addEventListener("visibilitychange", this.onVisible);
    onState("connecting");
    this.start();
  }

  start() {
    if (this.ended || this.source) return;
    const source = (this.source = new EventSource(this.path));
    source.addEventListener("open", () => {
      this.failures = 0;
      this.onState("live");
      this.onOpen();
    });
    source.addEventListener("error", () => this.broken());
    for (const kind of KINDS) source.addEventListener(kind, (message) => this.onEvent(JSON.parse(message.data)));
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.source?.close();
    this.source = null;
  }

  // Reads another stream from now on.
  move(path) {
    this.path = path;
    this.stop();
    this.start();
  }

  broken() {
    this.stop();
    if (this.ended || document.hidden) return;
    this.onState(this.failures ? "lost" : "connecting"); // a connection that breaks once is no news
    const seconds = RETRY_SECONDS[Math.min(this.failures, RETRY_SECONDS.length - 1)];
    this.failures += 1;
    this.timer = setTimeout(() => this.retry(), 1000 * seconds);
  }

  // A stream does not say why it failed, so ask for something else first. If that fails with 401, the user is asked to
  // sign in, and this view ends.
  async retry() {
    try {
      await call("GET", "/v1/user");
      if (!this.ended) this.start();
    } catch {
      if (!this.ended) this.broken();
    }
  }

  close() {
    this.ended = true;
    this.onState(null);
    document.removeEventListener("visibilitychange", this.onVisible);
    this.stop();
  }
}
