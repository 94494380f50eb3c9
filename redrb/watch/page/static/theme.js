// The theme: that of the system, until the button chooses one. Runs before the first paint.
"use strict";
const stored = localStorage.getItem("redrb-theme");
if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const label = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("redrb-theme", next);
    label();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
});
