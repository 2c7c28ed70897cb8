// Keeps a page fresh: asks for its changing part every two seconds and changes what differs, so that focus, open
// details and half-filled forms stay. Without this script every page still works; it is then as old as it is.
"use strict";

const REFRESH_MS = 2000;
const live = document.querySelector("[data-live]");
const pulse = document.getElementById("pulse");
const offline = document.getElementById("offline");

// --- fresh numbers -----------------------------------------------------------------------------------

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: { "X-Fragment": "live" }, cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text.slice(0, 500));
    const fresh = new DOMParser().parseFromString(`<div>${text}</div>`, "text/html").body.firstElementChild;
    Idiomorph.morph(live, fresh.childNodes, MORPHING);
    drawCharts();
    tell("");
  } catch (error) {
    tell(error instanceof TypeError ? "The web admin does not answer. The numbers below are old." : error.message);
  }
}

function tell(sentence) {
  pulse.classList.toggle("off", sentence !== "");
  pulse.textContent = sentence === "" ? "live" : "not live";
  offline.hidden = sentence === "";
  offline.textContent = sentence;
}

async function forever() {
  await refresh();
  setTimeout(forever, REFRESH_MS);
}

// --- changing what differs ---------------------------------------------------------------------------

// Idiomorph changes the page to what the server says now. What somebody is using stays: open details, forms that were
// touched, and charts, which get their new numbers from charts.js.
const MORPHING = {
  morphStyle: "innerHTML",
  ignoreActiveValue: true,
  callbacks: {
    beforeNodeMorphed(old, fresh) {
      if (old.nodeName === "FORM") return !(old.contains(document.activeElement) || old.dataset.touched);
      if (old.nodeType === Node.ELEMENT_NODE && old.matches(".plot.drawn") && fresh.matches(".plot")) {
        old.setAttribute("aria-label", fresh.getAttribute("aria-label"));
        return false;
      }
      return true;
    },
    beforeAttributeUpdated(name, node) {
      return !(name === "open" && node.nodeName === "DETAILS");
    },
  },
};

document.addEventListener("input", (event) => {
  const form = event.target.closest("form");
  if (form) form.dataset.touched = "1";
});

// --- light and dark ----------------------------------------------------------------------------------

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redrawCharts();
  document.cookie = `danube-theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);

if (live) {
  pulse.hidden = false;
  setTimeout(forever, REFRESH_MS);
}
