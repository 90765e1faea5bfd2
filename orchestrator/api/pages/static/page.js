// Keeps parts of a page as they are now. Without it every page is the same, and is loaded again by hand.
"use strict";

const RETRY_MS = 4000;

// What hinders is told until it is over; what has ended stays told.
let isTrouble = false;

function tell(text, hinders = false) {
  const line = document.getElementById("live-state");
  isTrouble = hinders;
  if (line && line.textContent !== text) line.textContent = text;
}

function goOn() {
  if (isTrouble) tell("");
}

// Opened parts stay open, and what was scrolled to its end stays there, when a part is replaced.
function swap(old, made) {
  const open = new Set([...old.querySelectorAll("details[open][id]")].map((one) => one.id));
  made.querySelectorAll("details[id]").forEach((one) => { if (open.has(one.id)) one.open = true; });
  const places = new Map([...old.querySelectorAll("[id].keeps")].map((one) => [one.id, [one.scrollTop, one.scrollTop + one.clientHeight >= one.scrollHeight - 4]]));
  old.replaceWith(made);
  made.querySelectorAll("[id].keeps").forEach((one) => {
    const [top, atEnd] = places.get(one.id) || [0, true];
    one.scrollTop = atEnd ? one.scrollHeight : top;
  });
}

function parse(html) {
  return new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
}

// Nobody is interrupted who types, selects, or stands on a button of the part.
function isInUse(part) {
  const selection = window.getSelection();
  return part.contains(document.activeElement) || (selection && !selection.isCollapsed && part.contains(selection.anchorNode));
}

async function refresh(id, address) {
  const part = document.getElementById(id);
  if (!part || document.hidden || isInUse(part)) return true;
  const answer = await fetch(address, { headers: { "X-Fragment": "1" }, redirect: "manual", cache: "no-store" });
  if (answer.status === 401) {
    tell("You are logged out: load the page again to log in.");
    return false;
  }
  if (!answer.ok) throw new Error(String(answer.status));
  const made = parse(await answer.text());
  if (made && made.id === id && !isInUse(part) && made.outerHTML !== part.outerHTML) swap(part, made);
  goOn();
  return true;
}

function watch(part) {
  const { id, dataset } = part;
  const every = Number(dataset.every);
  const again = async () => {
    let goesOn = true;
    try {
      goesOn = (await refresh(id, dataset.live)) && Boolean(document.getElementById(id)?.dataset.live);
    } catch {
      tell("The service does not answer; trying again.", true);
    }
    if (goesOn) setTimeout(again, every);
  };
  setTimeout(again, every);
}

// A run as it goes on: each message has steps, which replace those of their ids or follow them.
function follow(list) {
  const source = new EventSource(list.dataset.stream);
  source.onopen = goOn;
  source.addEventListener("parts", (event) => {
    for (const [id, html] of JSON.parse(event.data)) {
      const made = parse(html);
      const old = document.getElementById(id);
      if (!made || made.id !== id || (old && isInUse(old))) continue;
      if (old) swap(old, made);
      else list.append(made);
    }
  });
  source.addEventListener("end", (event) => {
    source.close();
    tell(JSON.parse(event.data).told);
  });
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      tell("The stream broke off; trying again.", true);
      setTimeout(() => follow(list), RETRY_MS);
    } else {
      tell("The stream broke off; it goes on as soon as the service answers.", true);
    }
  };
}

document.querySelectorAll("[data-live]").forEach(watch);
document.querySelectorAll("[data-stream]").forEach(follow);
document.querySelectorAll(".keeps").forEach((one) => { one.scrollTop = one.scrollHeight; });
