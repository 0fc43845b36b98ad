// The fields of the form for a job of a verb, one row per field, and the request that is made from them.
import { VERBS } from "./options.js";

export const NAMES = Object.keys(VERBS);

// Fields have a name, a label, a help text, a kind ("text" by default, or a list of choices, or "check", "number",
// "numbers", "pair", "transform", "ids", "time"), a placeholder, and for a path, the roots that it may be in. A check
// box with `off` stands for false. The server sends the fields of operands and options, each option with its group.
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

const READ = {
  check: (text, { off }) => !off,
  number: Number,
  numbers: (text) => { const all = text.split(/[\s,]+/).map(Number); return all.length > 1 ? all : all[0]; },
  time: (text) => new Date(text).getTime() / 1000,
  ids: (text) => text.split(/[\s,]+/),
  pair: (text) => text.split(/\s*[x×,]\s*/).map(Number),
  // An argument is a number, a word, or the ROOT:PATH of a .npy file.
  transform: (text) => ({ Transform: Object.fromEntries(text.split(/\s*,\s*/).filter(Boolean).map((part) => {
    const [name, value = true] = part.split(/\s*=\s*/);
    if (value === true || value === "") return [name, value];
    return [name, value.endsWith(".npy") ? { load: value } : Number.isNaN(Number(value)) ? value : Number(value)];
  })) }),
};
// A text that is JSON is a made value, such as {"concat": {"parts": [...]}}.
const read = (text, field) => (field.root && text.startsWith("{") ? JSON.parse(text) : (READ[field.kind] ?? String)(text, field));

// Returns the form of a verb: groups of fields, further fields, all fields, and the functions below.
export const formOf = (verb) => {
  const { parameters, options } = VERBS[verb];
  const of = (group) => options.filter((option) => option.group === group);
  const operands = parameters.flatMap((field) => [field, ...of(field.name), ...(field.root === "rw" && field.name !== "c" ? of("c") : [])]);
  const own = of("verb"), checks = of("more").filter(({ kind }) => kind === "check");
  const groups = [[verb === "gemm" ? "Product" : "Operands", operands], ...(own.length ? [["Options", own]] : []),
    ["Budgets", of("budgets")], ["Job", JOB]];
  const more = [...of("more").filter(({ kind }) => kind !== "check"), ...LATER, ...checks];
  const fields = [...groups.flatMap(([, each]) => each), ...more];
  const isOption = new Set(options.map(({ name }) => name));

  // Returns the body of a request from the texts of the fields; a check box that is not checked has no text.
  const bodyOf = (texts) => {
    const body = verb === "gemm" ? {} : { verb }, given = {};
    for (const [name, text] of Object.entries(texts)) {
      if (text === "") continue;
      (isOption.has(name) ? given : body)[name] = read(text, fields.find((field) => field.name === name));
    }
    return { ...body, options: given };
  };

  // Returns the texts of the fields for a job like this one. Its budgets are left to the service.
  const textsOf = (job) => {
    const texts = { name: job.name };
    for (const { name } of parameters) texts[name] = textOf(job[name]);
    for (const name of ["priority", "max_attempts"]) texts[name] = String(job[name]);
    for (const [name, value] of Object.entries(job.options)) {
      if (of("budgets").some((budget) => budget.name === name)) continue;
      const field = fields.find((each) => each.name === name);
      if (field?.off) texts[name] = value === false ? "on" : "";
      else texts[name] = value === true ? "on" : value === false ? "" : textOf(value, field?.kind);
    }
    return texts;
  };

  // Returns the names of the fields that a problem is about. Problems do not name fields. Their texts begin with the
  // field or its value, or quote the value.
  const fieldsOf = (problem, texts) => {
    const { message } = problem;
    const located = /^body\.(?:options\.)?(\w+)/.exec(message) ?? /^(?:option )?(\w+)(?: =| of \w+ =| must be)/.exec(message)
      ?? /^option (\w+)/.exec(message);
    if (located && located[1] in texts) return [located[1]];
    const budget = of("budgets").find(({ label }) => message.startsWith(label.toLowerCase()));
    if (budget) return [budget.name];
    const names = (text) => text && (message.startsWith(`${text}:`) || message.includes(`'${text}'`));
    const value = Object.entries(texts).find(([, text]) => names(text));
    if (value) return [value[0]];
    return message.startsWith("shapes do not match") ? ["a", "b"] : [];
  };
  return { groups, more, fields, bodyOf, textsOf, fieldsOf };
};

const textOf = (value, kind) => {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.join(kind === "pair" ? "x" : ", ");
  if (kind === "transform") {
    const texts = Object.entries(value.Transform).map(([name, given]) => (given === true ? name : `${name}=${given?.load ?? given}`));
    return texts.join(",");
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
};
export const messageOf = (problem) => {
  const text = problem.message.replace(/^body\.(?:options\.)?\w+(?:\.[\w[\]-]+)*: /, "");
  return /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
};
