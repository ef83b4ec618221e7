"use strict";
// Everything from the device goes through textContent or URLSearchParams; nothing is read as HTML.
const at = (id) => document.getElementById(id);
const KEYS = "1234567890";
let now = null, shown = null, busy = false, drawnClasses = "";

const address = (path, one) => `${path}?${new URLSearchParams({ camera: one.camera, frame: one.frame })}`;
const isSame = (a, b) => a && b && a.camera === b.camera && a.frame === b.frame;
const percent = (share) => `${Math.round(100 * share)} %`;

function say(text, bad) {
  at("said").textContent = text;
  at("said").classList.toggle("bad", Boolean(bad));
}

function drawClasses() {
  const names = JSON.stringify(now.classes);
  if (names === drawnClasses) return;
  drawnClasses = names;
  at("classes").replaceChildren(...now.classes.map((name, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.class = name;
    const word = document.createElement("span");
    word.textContent = name;
    button.append(word);
    if (index < KEYS.length) {
      const key = document.createElement("kbd");
      key.textContent = KEYS[index];
      button.append(key);
    }
    button.addEventListener("click", () => label(name));
    return button;
  }));
}

function drawFrame() {
  // The frame that somebody looks at stays until it is labelled, skipped or too old.
  const same = now.waiting.find((one) => isSame(one, shown));
  const next = same || now.waiting[0] || null;
  if (!isSame(next, shown)) {
    if (next) {
      at("frozen").src = address("/frame", next);
      at("frozen").alt = `Frame ${next.frame} of camera ${next.camera}`;
    } else {
      at("frozen").removeAttribute("src");
    }
  }
  shown = next;
  at("frozen").hidden = !next;
  at("nothing").hidden = Boolean(next);
  at("guess").replaceChildren();
  if (next && next.answer) {
    const name = document.createElement("b");
    name.textContent = next.answer.class;
    at("guess").append("The model says ", name, `, ${percent(next.answer.confidence)} sure. ${now.num_waiting} wait.`);
  } else if (next) {
    at("guess").textContent = `No model answers yet. ${now.num_waiting} wait.`;
  }
  for (const button of at("classes").children) {
    button.disabled = !next;
    button.classList.toggle("guessed", Boolean(next && next.answer) && button.dataset.class === next.answer.class);
  }
  at("skip").disabled = !next;
  at("undo").disabled = !now.undo;
}

function drawLive() {
  for (const camera of now.cameras) {
    let figure = [...at("cameras").children].find((one) => one.dataset.camera === camera.name);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.camera = camera.name;
      const picture = document.createElement("img");
      picture.alt = `Live picture of camera ${camera.name}`;
      picture.src = `/live?${new URLSearchParams({ camera: camera.name })}`;
      figure.append(picture, document.createElement("figcaption"));
      at("cameras").append(figure);
    }
    const said = camera.answers.map((one) => `${one.class} ${percent(one.confidence)}`).join(", ");
    figure.lastChild.textContent = `${camera.name}: ${said || "no answer"}`;
  }
}

function draw() {
  document.title = `${now.client} · Label studio`;
  at("where").textContent = `${now.client}, ${now.round < 0 ? "no round yet" : `round ${now.round}`}, ` +
    (now.version > 0 ? `version ${now.version}` : "no model yet");
  at("keep").textContent = `${now.keep_s} s`;
  if (now.labels) {
    const { have, need, pictures, need_pictures: needPictures } = now.labels;
    const missing = Math.max(0, need - have, needPictures - pictures);
    at("missing").textContent = missing ? `${missing} more until the next round` : "Enough for the next round";
    at("progress").value = Math.min(1, have / need, needPictures ? pictures / needPictures : 1);
    at("progress-text").textContent = `${have} of ${need} labels`;
  }
  drawClasses();
  drawFrame();
  drawLive();
}

async function look() {
  try {
    now = await (await fetch("/api/state")).json();
    draw();
  } catch {
    say("The device doesn't answer; trying again.", true);
  }
}

async function post(path, body) {
  if (busy) return;
  busy = true;
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const found = await answer.json();
    say(found.error || found.said, !answer.ok);
    await look();
  } catch {
    say("The device doesn't answer; nothing was labelled.", true);
  } finally {
    busy = false;
  }
}

const label = (name) => shown && post("/api/label", { camera: shown.camera, frame: shown.frame, class: name });
const skip = () => shown && post("/api/skip", { camera: shown.camera, frame: shown.frame });
const undo = () => now && now.undo && post("/api/undo", {});

at("skip").addEventListener("click", skip);
at("undo").addEventListener("click", undo);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || !now) return;
  const index = KEYS.indexOf(event.key);
  if (index >= 0 && index < now.classes.length) label(now.classes[index]);
  else if (event.key === "s") skip();
  else if (event.key === "u") undo();
});

async function forever() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, 700));
  }
}
window.addEventListener("load", forever);
