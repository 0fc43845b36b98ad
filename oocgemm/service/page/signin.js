// The view for those who are not signed in.
import { call } from "./api.js";
import { h, setText } from "./dom.js";

export const signInView = (main, { used, onDone }) => {
  document.title = "Sign in - oocgemm";
  const wrong = h("p", { class: "bad", role: "alert", id: "token-wrong" });
  const field = h("input", {
    id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false",
    "aria-describedby": "token-wrong token-help", placeholder: "oocgemm_…",
  });
  // Password managers store a token under this name.
  const name = h("input", { type: "text", autocomplete: "username", value: "oocgemm", hidden: true });
  const button = h("button", { class: "primary" }, "Sign in");
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    setText(wrong, "");
    try {
      await call("POST", "/login", { body: { token: field.value.trim() }, login: true });
      onDone();
    } catch (problem) {
      setText(wrong, problem.message);
      field.setAttribute("aria-invalid", "true");
      button.disabled = false;
      field.focus();
    }
  };
  main.replaceChildren(h("section", { class: "card signin" },
    h("h1", { tabindex: -1 }, "Sign in"),
    used && h("p", { class: "notice" },
      "That link has been used before, or is too old. Each link works once, for ten minutes: the server has printed a new one."),
    h("form", { onsubmit: submit }, name,
      h("label", { for: "token" }, "Token"), field, wrong,
      h("p", { class: "note", id: "token-help" },
        "A token comes from whoever runs this service: ", h("code", {}, "oocgemm token create NAME"), "."),
      button),
    h("p", { class: "note" },
      "If you run it yourself, open the URL that ", h("code", {}, "oocgemm serve"), " has printed."),
  ));
  field.focus();
  return { close() {} };
};
