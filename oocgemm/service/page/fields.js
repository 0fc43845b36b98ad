// The fields of the form, one row per field, and the request that is made from them.
import { OPTIONS } from "./options.js";

// Fields have a name, a label, a help text, a kind ("text" by default, or a list of choices, or "check", "number",
// "pair", "ids", "time"), a placeholder, and for a path, the roots that it may be in. Paths are required. The server
// sends the fields of options, each with its group.
const of = (group) => OPTIONS.filter((option) => option.group === group);
const JOB = [
  { name: "name", label: "Name", help: "How lists show the job.", place: "none" },
  { name: "priority", label: "Priority", help: "Higher ones start first.", kind: "number", place: "0" },
  { name: "held", label: "Hold", help: "until someone releases it", kind: "check" },
];
const LATER = [
  { name: "max_attempts", label: "Attempts", help: "Failures until the job is given up.", kind: "number", place: "3" },
  { name: "deadline", label: "Deadline", help: "The job fails if it has not succeeded by then.", kind: "time" },
  { name: "needs", label: "After jobs", help: "Ids of jobs that must succeed before.", kind: "ids", place: "none" },
];
export const GROUPS = [
  ["Product", [
    { name: "a", label: "A", help: "ROOT:PATH of the left operand.", place: "data:dir/A.zarr", root: "all" },
    ...of("a"),
    { name: "b", label: "B", help: "ROOT:PATH of the right operand.", place: "data:dir/B.zarr", root: "all" },
    ...of("b"),
    { name: "c", label: "C", help: "ROOT:PATH of the result, in a writable root.", place: "out:C.zarr", root: "rw" },
    ...of("c"),
  ]],
  ["Budgets", of("budgets")],
  ["Job", JOB],
];
const checks = of("more").filter(({ kind }) => kind === "check");
export const MORE = [...of("more").filter(({ kind }) => kind !== "check"), ...LATER, ...checks];
export const FIELDS = [...GROUPS.flatMap(([, fields]) => fields), ...MORE];

const IS_OPTION = new Set(OPTIONS.map(({ name }) => name));
const READ = {
  check: () => true,
  number: Number,
  time: (text) => new Date(text).getTime() / 1000,
  ids: (text) => text.split(/[\s,]+/),
  pair: (text) => text.split(/\s*[x×,]\s*/).map(Number),
};

// Returns the body of a request from the texts of the fields; a check box that is not checked has no text.
export const bodyOf = (texts) => {
  const body = {}, options = {};
  for (const [name, text] of Object.entries(texts)) {
    if (text === "") continue;
    const { kind } = FIELDS.find((field) => field.name === name);
    (IS_OPTION.has(name) ? options : body)[name] = (READ[kind] ?? String)(text);
  }
  return { ...body, options };
};

// Returns the texts of the fields for a job like this one. Its budgets are left to the service.
export const textsOf = (job) => {
  const texts = { a: job.a, b: job.b, c: job.c, name: job.name };
  for (const name of ["priority", "max_attempts"]) texts[name] = String(job[name]);
  for (const [name, value] of Object.entries(job.options)) {
    if (of("budgets").some((budget) => budget.name === name)) continue;
    texts[name] = value === true ? "on" : value === false ? "" : Array.isArray(value) ? value.join("x") : String(value);
  }
  return texts;
};

// Returns the names of the fields that a problem is about. Problems do not name fields. Their texts begin with the
// field or its value, or quote the value.
export const fieldsOf = (problem, texts) => {
  const { message } = problem;
  const located = /^body\.(?:options\.)?(\w+)/.exec(message) ?? /^option (\w+)/.exec(message);
  if (located && located[1] in texts) return [located[1]];
  const budget = of("budgets").find(({ label }) => message.startsWith(label.toLowerCase()));
  if (budget) return [budget.name];
  const names = (text) => text && (message.startsWith(`${text}:`) || message.includes(`'${text}'`));
  const value = Object.entries(texts).find(([, text]) => names(text));
  if (value) return [value[0]];
  if (message.startsWith("shapes do not match")) return ["a", "b"];
  return [];
};
export const messageOf = (problem) => {
  const text = problem.message.replace(/^body\.(?:options\.)?\w+(?:\.[\w[\]-]+)*: /, "");
  return /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
};
