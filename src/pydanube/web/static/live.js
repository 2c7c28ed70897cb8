// Keeps a page fresh: asks for its changing part every two seconds and changes what differs, so that focus, open
// details and half-filled forms stay. Without this script every page still works; it is then as old as it is.
"use strict";

const REFRESH_MS = 2000;
const live = document.querySelector("[data-live]");
const pulse = document.getElementById("pulse");
const offline = document.getElementById("offline");
let tip, cross; // of the chart under the pointer

// --- fresh numbers -----------------------------------------------------------------------------------

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, { headers: { "X-Fragment": "live" }, cache: "no-store" });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text.slice(0, 500));
    const fresh = new DOMParser().parseFromString(`<div>${text}</div>`, "text/html").body.firstElementChild;
    children(live, fresh);
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

function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
  } else if (old.nodeType === Node.ELEMENT_NODE) {
    if (old.nodeName === "FORM" && (old.contains(document.activeElement) || old.dataset.touched)) return;
    attributes(old, fresh);
    children(old, fresh);
  }
}

function attributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

// Something that moved is still the same thing: it is looked for by its key, its id, or what kind of thing it is.
function children(old, fresh) {
  let at = skip(old.firstChild);
  for (const wanted of fresh.childNodes) {
    if (isBlank(wanted)) continue;
    const same = find(at, mark(wanted));
    if (!same) {
      old.insertBefore(document.importNode(wanted, true), at);
    } else {
      if (same !== at) old.insertBefore(same, at);
      at = skip(same.nextSibling);
      change(same, wanted);
    }
  }
  while (at) {
    const next = skip(at.nextSibling);
    if (at !== tip && at !== cross) at.remove();
    at = next;
  }
}

function mark(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return node.nodeName;
  const own = node.dataset.key || node.id || node.getAttribute("aria-labelledby") || node.getAttribute("class");
  return `${node.nodeName} ${own || ""}`;
}

function find(node, wanted) {
  while (node && mark(node) !== wanted) node = node.nextSibling;
  return node;
}

function isBlank(node) {
  return node.nodeType === Node.COMMENT_NODE || (node.nodeType === Node.TEXT_NODE && !node.nodeValue.trim());
}

function skip(node) {
  while (node && isBlank(node)) node = node.nextSibling;
  return node;
}

document.addEventListener("input", (event) => {
  const form = event.target.closest("form");
  if (form) form.dataset.touched = "1";
});

// --- numbers under the pointer -----------------------------------------------------------------------

function point(event) {
  const canvas = event.target.closest && event.target.closest(".canvas");
  if (!canvas) return unpoint();
  const chart = canvas.closest(".chart");
  const lines = JSON.parse(chart.dataset.lines);
  const box = canvas.getBoundingClientRect();
  const part = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  const place = Math.round(part * (lines[0].values.length - 1));
  const first = Number(chart.dataset.first);
  const step = (Number(chart.dataset.last) - first) / (lines[0].values.length - 1);
  const time = new Date((first + place * step) * 1000).toISOString().slice(11, 19) + "Z";
  const said = lines.map((line) => {
    const value = line.values[place];
    return `${line.label} ${value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 })}`;
  });
  if (!tip || tip.parentNode !== canvas) {
    unpoint();
    cross = canvas.appendChild(Object.assign(document.createElement("div"), { className: "cross" }));
    tip = canvas.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  }
  const x = part * box.width;
  cross.style.left = `${x}px`;
  tip.textContent = `${time}  ${said.join("  ")}`;
  tip.style.left = `${Math.min(Math.max(x + 8, 0), Math.max(box.width - tip.offsetWidth, 0))}px`;
}

function unpoint() {
  if (tip) tip.remove();
  if (cross) cross.remove();
  tip = cross = undefined;
}

document.addEventListener("pointermove", point, { passive: true });

// --- light and dark ----------------------------------------------------------------------------------

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `danube-theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
});

if (live) {
  pulse.hidden = false;
  setTimeout(forever, REFRESH_MS);
}
