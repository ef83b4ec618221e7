"use strict";
// Times become those of the reader's clock; what changed at the aggregator is fetched and put in place.
const status = document.getElementById("live-state");
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

function span(seconds) {
  const s = Math.max(0, Math.round(seconds)), pad = n => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
}

function times() {
  for (const time of document.querySelectorAll("time")) {
    const at = new Date(time.dateTime), today = at.toDateString() === new Date().toDateString();
    const left = (at - Date.now()) / 1000, { until, since } = time.dataset;
    const text = until !== undefined ? span(left) : since !== undefined ? span(-left) : (today ? clock : day).format(at);
    if (time.textContent !== text) time.textContent = text;
    time.title = at.toLocaleString();
  }
}

let stamp = null, busy = false, again = false, refused = "";

async function renew() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    refused = answer.redirected ? "you are logged out; load this page again, it shows what was known last"
      : answer.ok ? "" : `the console refuses (${answer.status}); this page shows what was known last`;
    status.textContent = refused || "live";
    if (refused) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (!next || next.isEqualNode(part)) continue;
      const focus = document.activeElement, inside = part.contains(focus);
      if (inside && focus.matches("input, select, textarea")) continue;  // somebody writes there
      const place = inside ? focus.getAttribute("href") || focus.id : null;
      const opened = [...part.querySelectorAll("details[open]")].map(one => one.id);
      const imported = document.importNode(next, true);
      part.replaceWith(imported);
      opened.forEach(id => { const one = document.getElementById(id); if (one) one.open = true; });
      if (place) [...imported.querySelectorAll("a, button, summary")].find(one => (one.getAttribute("href") || one.id) === place)?.focus();
    }
    times();
  } finally {
    busy = false;
    if (again) { again = false; renew(); }
  }
}

// A browser keeps six connections to one address: only the page that is looked at holds one.
let source = null;
function listen() {
  if (document.hidden) { source?.close(); source = null; return; }
  if (source) return;
  source = new EventSource("/live");
  source.onmessage = event => {
    if (refused || (stamp !== null && stamp !== event.data)) renew();
    else status.textContent = "live";
    stamp = event.data;
  };
  source.onerror = () => {
    status.textContent = "the console doesn't answer; this page shows what was known last";
    if (source && source.readyState === EventSource.CLOSED) { source = null; setTimeout(listen, 5000); }
  };
}

times();
setInterval(times, 1000);
if (document.querySelector("[data-live]")) {
  document.addEventListener("visibilitychange", listen);
  listen();
}
