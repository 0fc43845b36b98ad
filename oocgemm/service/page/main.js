// Signs in, shows the view that the URL's hash names, and says whether the page is connected.
import { call, onSignedOut } from "./api.js";
import { setText, show } from "./dom.js";
import { formView } from "./form.js";
import { jobView } from "./job.js";
import { nothing } from "./parts.js";
import { queueView } from "./queue.js";
import { signInView } from "./signin.js";
import { time } from "./words.js";

const byId = (id) => document.getElementById(id);
const [main, connection, lost, userName] = ["main", "connection", "lost", "user"].map(byId);
const pages = document.querySelector("nav");
let user = null, view = null, signedOut = false, since = 0, first = true;

const onState = (state) => {
  show(connection, state !== null);
  if (state === null) { since = 0; show(lost, false); return; }
  connection.dataset.state = state;
  setText(connection, { connecting: "Connecting", live: "Live", lost: "Disconnected" }[state]);
  if (state === "live") { since = 0; show(lost, false); }
  if (state === "lost") {
    since ||= Date.now() / 1000;
    setText(lost, `The service cannot be reached since ${time(since)}. Jobs go on meanwhile. `
      + "This page tries again by itself.");
    show(lost, true);
  }
};

const showView = (make, options = {}) => {
  view?.close();
  view = make(main, { user, onState, ...options });
  // Screen readers read a new view from its heading on. The first view gets no focus, so that all is read.
  if (!first && !main.contains(document.activeElement)) main.querySelector("h1")?.focus({ preventScroll: true });
  if (!first) scrollTo(0, 0);
  first = false;
};

const route = async () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?"), [page, id] = path.split("/");
  const used = page === "login-code-used";
  if (!user && !(await signIn(used))) return;
  if (used) { history.replaceState(null, "", "#/"); return route(); }
  const current = page === "" || page === "jobs" ? "queue" : page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (page === "") showView(queueView);
  else if (page === "jobs" && id) showView(jobView, { id: decodeURIComponent(id) });
  else if (page === "new") {
    const given = new URLSearchParams(query);
    showView(formView, { from: given.get("from"), verb: given.get("verb") });
  }
  else showView(noView);
};
const noView = (to) => {
  to.replaceChildren(nothing("There is no such page", "The address may have been mistyped."));
  return { close() {} };
};

// Finds out who the user is. Returns whether they are signed in.
const signIn = async (used) => {
  try {
    user = await call("GET", "/v1/user");
  } catch (problem) {
    if (problem.status !== 401) waitForService(problem);
    else if (used) askForToken(true);
    return false;
  }
  signedOut = false;
  setText(userName, user.name);
  for (const part of [userName, pages]) show(part, true);
  return true;
};

const waitForService = (problem) => {
  main.replaceChildren(nothing(problem.title, `${problem.message} This page tries again by itself.`));
  setTimeout(route, 2000);
};

const askForToken = (used = false) => {
  user = null;
  signedOut = true;
  for (const part of [userName, pages]) show(part, false);
  showView(signInView, { used, onDone: route });
};
onSignedOut(() => { if (!signedOut) askForToken(); });

byId("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", route);
route();
