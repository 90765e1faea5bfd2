// Updates parts of a page. Every page also works without it.
"use strict";

const RETRY_MS = 4000;

// A failure is shown until it is over. An end stays shown.
let isFailure = false;

function show(text, failed = false) {
  const line = document.getElementById("live-state");
  isFailure = failed;
  if (line && line.textContent !== text) line.textContent = text;
}

function clearFailure() {
  if (isFailure) show("");
}

// When a part is replaced, its open details stay open and its scroll position stays.
function swap(old, updated) {
  const open = new Set([...old.querySelectorAll("details[open][id]")].map((details) => details.id));
  updated.querySelectorAll("details[id]").forEach((details) => { if (open.has(details.id)) details.open = true; });
  const positions = new Map([...old.querySelectorAll("[id].keeps")].map((box) => [box.id, [box.scrollTop, box.scrollTop + box.clientHeight >= box.scrollHeight - 4]]));
  old.replaceWith(updated);
  updated.querySelectorAll("[id].keeps").forEach((box) => {
    const [top, atEnd] = positions.get(box.id) || [0, true];
    box.scrollTop = atEnd ? box.scrollHeight : top;
  });
}

function parse(html) {
  return new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
}

// A part is not replaced while a person types, selects text or focuses a button in it.
function isInUse(part) {
  const selection = window.getSelection();
  return part.contains(document.activeElement) || (selection && !selection.isCollapsed && part.contains(selection.anchorNode));
}

async function refresh(id, address) {
  const part = document.getElementById(id);
  if (!part || document.hidden || isInUse(part)) return true;
  const response = await fetch(address, { headers: { "X-Fragment": "1" }, redirect: "manual", cache: "no-store" });
  if (response.status === 401) {
    show("You are logged out. Reload the page to log in.");
    return false;
  }
  if (!response.ok) throw new Error(String(response.status));
  const updated = parse(await response.text());
  if (updated && updated.id === id && !isInUse(part) && updated.outerHTML !== part.outerHTML) swap(part, updated);
  clearFailure();
  return true;
}

function watch(part) {
  const { id, dataset } = part;
  const every = Number(dataset.every);
  const update = async () => {
    let isActive = true;
    try {
      isActive = (await refresh(id, dataset.live)) && Boolean(document.getElementById(id)?.dataset.live);
    } catch {
      show("The service does not answer. Trying again.", true);
    }
    if (isActive) setTimeout(update, every);
  };
  setTimeout(update, every);
}

// Steps of a running run: a message replaces steps with the same id and appends new ones.
function follow(list) {
  const source = new EventSource(list.dataset.stream);
  source.onopen = clearFailure;
  source.addEventListener("parts", (event) => {
    for (const [id, html] of JSON.parse(event.data)) {
      const updated = parse(html);
      const old = document.getElementById(id);
      if (!updated || updated.id !== id || (old && isInUse(old))) continue;
      if (old) swap(old, updated);
      else list.append(updated);
    }
  });
  source.addEventListener("end", (event) => {
    source.close();
    show(JSON.parse(event.data).message);
  });
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      show("The connection was lost. Trying again.", true);
      setTimeout(() => follow(list), RETRY_MS);
    } else {
      show("The connection was lost. Updates continue when the service answers.", true);
    }
  };
}

const AGES = [[1, "s", 60], [60, "min", 3600], [3600, "h", 172800], [86400, "d", Infinity]];
// The clock of the browser may be wrong: ages count from the time of the service.
const clockOffsetMs = document.body.dataset.now ? Date.parse(document.body.dataset.now) - Date.now() : 0;

function formatAge(seconds) {
  const [size, unit] = AGES.find(([, , below]) => seconds < below);
  return `${Math.floor(Math.max(0, seconds) / size)} ${unit} ago`;
}

function updateAges() {
  document.querySelectorAll("time.ago").forEach((element) => {
    const text = formatAge((Date.now() + clockOffsetMs - Date.parse(element.dateTime)) / 1000);
    if (element.textContent !== text) element.textContent = text;
  });
}

setInterval(updateAges, 5000);
document.querySelectorAll("[data-live]").forEach(watch);
document.querySelectorAll("[data-stream]").forEach(follow);
document.querySelectorAll(".keeps").forEach((box) => { box.scrollTop = box.scrollHeight; });
