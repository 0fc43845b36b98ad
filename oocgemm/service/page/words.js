// Words for states and reasons, and numbers with units.

export const STATES = {
  queued: "Waiting", held: "Held", starting: "Starting", running: "Running", pausing: "Pausing", paused: "Paused",
  cancelling: "Cancelling", succeeded: "Succeeded", failed: "Failed", cancelled: "Cancelled",
};
export const FINAL = new Set(["succeeded", "failed", "cancelled"]);
export const ACTIVE = new Set(["starting", "running", "pausing", "cancelling"]);

const REASONS = {
  priority: "for jobs that come before it",
  "device-memory": "for room on a device",
  "host-memory": "for host memory",
  disk: "for disk space",
  dependency: "for another job to succeed",
  "retry-at": "to try again",
  draining: "for the service to start jobs again",
};
// Says why a job waits.
export const reason = (job) => {
  if (job.state === "held") return "until someone releases it";
  if (job.state === "paused") return "until someone resumes it";
  if (job.state !== "queued") return "";
  if (job.reason === "retry-at" && job.not_before) return `to try again ${soon(job.not_before)}`;
  return REASONS[job.reason] ?? "for its turn";
};

export const ACTIONS = {
  hold: "Hold", release: "Release", pause: "Pause", resume: "Resume", retry: "Retry", cancel: "Cancel",
};

export const title = (job) => job.name || (job.verb === "gemm" ? `${last(job.c)} = ${last(job.a)} × ${last(job.b)}`
  : `${last(job.out)} = ${job.verb}(${operandsOf(job).map(([, value]) => last(value)).join(", ")})`);
const last = (value) => {
  if (typeof value === "string") return value.split(/[:/]/).at(-1);
  return typeof value === "object" && !Array.isArray(value) ? Object.keys(value)[0] : String(value);
};
// Returns the operands and other parameters of a job, with their names.
export const operandsOf = (job) => ["a", "b", "e", "x", "k", "v", "y", "alpha", "to"]
  .filter((name) => job[name] !== undefined && job[name] !== null).map((name) => [name, job[name]]);
export const count = (number, one, many = `${one}s`) => `${spaced(number)} ${number === 1 ? one : many}`;
// All numbers have thin spaces between thousands, as in the report.
export const spaced = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
export const extents = (...sizes) => sizes.map(spaced).join(" × ");
export const shape = (plan) => extents(plan.m, plan.n, plan.k);
export const dtypes = (plan) => (plan.a_dtype === plan.c_dtype || plan.c_dtype.startsWith("void") ? plan.a_dtype : `${plan.a_dtype} to ${plan.c_dtype}`);

const scaled = (value, units, base) => {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i < units.length - 1) { value /= base; i += 1; }
  return `${value >= 1000 ? value.toFixed(0) : Number(value.toPrecision(3))} ${units[i]}`;
};
export const size = (bytes) => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
export const rate = (flops) => scaled(flops, ["", "k", "M", "G", "T", "P"].map((p) => `${p}FLOP/s`), 1000);
export const percent = (share) => `${Math.floor(100 * share)}%`;

export const duration = (seconds) => {
  if (seconds < 1) return scaled(Math.max(0, seconds) * 1e9, ["ns", "µs", "ms", "s"], 1000);
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return minutes < 1440 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min`
    : `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
};

const now = () => Date.now() / 1000;
const clock = (options) => new Intl.DateTimeFormat(undefined, options);
const DAY = clock({ month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const HOUR = clock({ hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SECOND = clock({ hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const today = (at) => new Date(at * 1000).toDateString() === new Date().toDateString();

export const time = (at) => (today(at) ? SECOND : DAY).format(at * 1000);
export const ago = (at) => {
  const seconds = now() - at;
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return time(at);
};
// Says when something is predicted.
export const soon = (at) => {
  const seconds = at - now();
  if (seconds < 2) return "soon";
  if (seconds < 90) return `in ${Math.ceil(seconds)} s`;
  if (seconds < 5400) return `in ${Math.round(seconds / 60)} min`;
  return `${today(at) ? "at" : "on"} ${(today(at) ? HOUR : DAY).format(at * 1000)}`;
};
export const stamp = (element, at) => { element.setAttribute("datetime", new Date(at * 1000).toISOString()); };

// The seconds until a running job ends, from the tiles that have been written; null if that is unknown.
export const secondsLeft = (job) => {
  if (job.state !== "running" || !job.started || !job.progress) return null;
  const { done, total } = job.progress, passed = now() - job.started;
  if (done < 2) return passed < job.predicted_s ? job.predicted_s - passed : null; // it takes longer than predicted
  return (passed / done) * (total - done);
};
export const left = (job) => {
  const seconds = secondsLeft(job);
  if (seconds === null) return "";
  return seconds < 1 ? "ends soon" : `about ${duration(seconds)} left`;
};
