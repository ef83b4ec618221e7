"use strict";
// Times become those of the reader's clock; what changed at the aggregator is fetched and put in place.
const status = document.getElementById("live-state"), warning = document.getElementById("stale");
const SILENT_MS = 40000;  // the console says every 15 s that it is there
const PICTURES_MS = 5000;  // cameras' pictures are no change of the fleet: a client's page asks for them
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

function span(seconds) {
  const s = Math.max(0, Math.round(seconds)), pad = n => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
}

function tell(problem) {
  status.textContent = problem || "live";
  warning.textContent = problem && problem[0].toUpperCase() + problem.slice(1) + ".";
  warning.hidden = !problem;
  document.body.classList.toggle("stale", Boolean(problem));
}

function times(page = document) {
  if (!warning.hidden) return;  // what was known last is counted no further
  for (const time of page.querySelectorAll("time")) {
    const at = new Date(time.dateTime), today = at.toDateString() === new Date().toDateString();
    const left = (at - Date.now()) / 1000, { until, since } = time.dataset;
    const text = until !== undefined ? span(left) : since !== undefined ? span(-left) : (today ? clock : day).format(at);
    if (time.textContent !== text) time.textContent = text;
    time.title = at.toLocaleString();
  }
}

const AWAY = "the console doesn't answer; this page shows what was known last";
const LOGGED_OUT = "you are logged out; load this page again, it shows what was known last";
const placeOf = one => one.getAttribute("href") || one.id || one.getAttribute("aria-label");
const rowOf = one => one.closest("li, tr");
let stamp = null, heard = 0, asked = 0, busy = false, again = false, refused = "";

async function renew() {
  if (busy) { again = true; return; }
  busy = true;
  asked = performance.now();
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, signal: AbortSignal.timeout(SILENT_MS) });
    refused = answer.redirected ? LOGGED_OUT
      : answer.ok ? "" : `the console refuses (${answer.status}); this page shows what was known last`;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!refused && document.querySelector("form.who") && !fresh.querySelector("form.who")) refused = LOGGED_OUT;
    tell(refused);
    if (refused) return;
    times(fresh);
    document.title = fresh.title;  // it names the round
    let last = null;
    for (const next of fresh.querySelectorAll("[data-live]")) {
      const part = document.getElementById(next.id), before = last;
      last = part;
      if (part && next.isEqualNode(part)) continue;
      const focus = document.activeElement, inside = part && part.contains(focus);
      if (inside && focus.matches("input, select, textarea")) continue;  // somebody writes there
      const place = inside ? placeOf(focus) : null, aside = part?.querySelector(".scroll")?.scrollLeft;
      const imported = document.importNode(next, true);
      last = part?.matches("[role=status]") ? part : imported;
      if (last === part) part.replaceChildren(...imported.childNodes);  // a screen reader tells what comes into it
      else if (part) part.replaceWith(imported);
      else before.after(imported);  // the first chart, say
      if (aside) last.querySelector(".scroll")?.scrollTo(aside, 0);
      if (!place) continue;
      // Of a client's many events the same one; where it stood last if it has gone.
      const same = [...last.querySelectorAll("a, button, [tabindex]")].filter(one => placeOf(one) === place);
      (same.find(one => rowOf(one)?.isEqualNode(rowOf(focus))) || same.at(-1))?.focus();
    }
    for (const part of document.querySelectorAll("[data-live]")) if (!fresh.getElementById(part.id)) part.remove();
    times();
  } catch {
    tell(AWAY);
    stamp = null;  // once more with the next word
  } finally {
    busy = false;
    if (again) { again = false; renew(); }
  }
}

// A browser keeps six connections to one address: only the page that is looked at holds one.
let source = null;
function hush() { source?.close(); source = stamp = null; }
function listen() {
  if (document.hidden) return hush();
  if (source) return;
  source = new EventSource("/live");
  heard = performance.now();
  source.onmessage = event => {
    heard = performance.now();
    if (refused || stamp !== event.data) renew();  // with the first word too: the page may be old, or the console new
    else tell("");
    stamp = event.data;
  };
  source.onerror = () => {
    stamp = null;
    if (source?.readyState !== EventSource.CLOSED) return tell(AWAY);
    source = null;  // refused: this page asks instead, and is told why where it may not look either
    renew();
    setTimeout(listen, 5000);
  };
}

function watch() {
  times();
  if (source && performance.now() - heard > SILENT_MS) { tell(AWAY); hush(); listen(); }
  if (source && !busy && location.pathname.startsWith("/clients/") && performance.now() - asked > PICTURES_MS) renew();
}

times();
setInterval(watch, 1000);
if (document.querySelector("[data-live]")) {
  document.addEventListener("visibilitychange", listen);
  listen();
}
