// The report of a run, in a frame. The frame is sandboxed, so it has an origin of its own, and this page and the frame
// send each other messages: the theme, and the height of the report, so that only the page scrolls.
import { h } from "./dom.js";

const root = document.documentElement;
// A frame that is not trusted must not make the page arbitrarily long.
const MAX_HEIGHT = 20_000;

export const report = (path) => {
  const link = h("a", { href: path, target: "_blank", rel: "noopener" }, "Open in a tab of its own");
  const frame = h("iframe", { src: path, title: "Report of the run", sandbox: "allow-scripts", loading: "lazy" });
  // The origin of the frame is opaque, so the message cannot name it.
  const sendTheme = () => frame.contentWindow?.postMessage({ theme: root.dataset.theme }, "*");
  const receive = (event) => {
    if (event.source !== frame.contentWindow || !(event.data?.height > 0)) return;
    frame.style.height = `${Math.min(event.data.height, MAX_HEIGHT)}px`;
    sendTheme(); // the first message says that the report has been loaded
  };
  const themes = new MutationObserver(sendTheme);
  addEventListener("message", receive);
  themes.observe(root, { attributeFilter: ["data-theme"] });
  return {
    element: h("section", { class: "card report" }, h("div", { class: "between" }, h("h2", {}, "Report"), link), frame),
    close() { removeEventListener("message", receive); themes.disconnect(); },
  };
};
