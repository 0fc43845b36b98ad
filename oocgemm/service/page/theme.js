// Sets the theme before anything is painted. This file is no module, because modules run later.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const apply = () => {
    const theme = chosen() ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = theme === "dark" ? "Light" : "Dark";
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("theme", next); } catch { /* the choice lasts until the page is loaded again */ }
      document.documentElement.dataset.theme = next;
      document.getElementById("theme").textContent = next === "dark" ? "Light" : "Dark";
    });
  });
})();
