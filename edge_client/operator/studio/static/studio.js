"use strict";
// Everything from the device goes through textContent or URLSearchParams; nothing is read as HTML.
const at = (id) => document.getElementById(id);
const KEYS = "1234567890";
const REACTION_MS = 700, ENOUGH_S = 3, STILL_S = 10;
let now = null, shown = null, busy = false, drawnClasses = "", sent = null, isAway = false, swapped = -REACTION_MS;
let asked = 0, answered = 0, undone = Infinity; // numbers of looks: the newest sent, the newest drawn, the first that knows of an undo

const address = (path, one) => `${path}?${new URLSearchParams({ camera: one.camera, frame: one.frame, session: now.session || "" })}`;
const isSame = (a, b) => a && b && a.camera === b.camera && a.frame === b.frame;
const isThere = () => Boolean(shown && at("frozen").complete && at("frozen").naturalWidth);
// Whether what is done now is meant for the frame that is shown: not before its picture came, nor right after it took the place of one that was too old.
const isSeen = () => isThere() && performance.now() - swapped >= REACTION_MS;
// A name from right to left draws the numbers that follow it to its other side.
const apart = (name) => (/[\u0590-\u08ff]/.test(name) ? `\u2068${name}\u2069` : name);
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
    button.addEventListener("click", () => choose(name));
    return button;
  }));
  if (!now.classes.includes(editor.name)) editor.name = now.classes[0];
}

const findsBoxes = () => now && now.max_boxes !== null;
const editor = new BoxEditor(at("boxes"), drawEditor);

function drawEditor({ boxes, chosen, name, before }) {
  if (!findsBoxes()) return;
  const named = {};
  for (const box of boxes) named[box.name] = (named[box.name] || 0) + 1;
  const count = Object.entries(named).map(([what, many]) => `${apart(what)} (${many})`).join(", ");
  const box = boxes[chosen];
  const place = box ? `, chosen: ${apart(box.name)}, ${Math.round(box.right - box.left)} by ${Math.round(box.bottom - box.top)} pixels` : "";
  const over = boxes.length > now.max_boxes ? `; at most ${now.max_boxes} are learned of one picture` : "";
  at("drawn").textContent = (count ? `To be learned: ${count}` : "To be learned: nothing is to be seen") + place + over;
  at("done").disabled = !isSeen() || boxes.length > now.max_boxes;
  at("add").disabled = !isSeen() || boxes.length >= now.max_boxes;
  at("remove").disabled = !box;
  at("undo").disabled = !now.undo && !before.length;
  for (const button of at("classes").children) {
    button.setAttribute("aria-pressed", button.dataset.class === (box ? box.name : name));
  }
}

function openBoxes(next) {
  if (!next) return editor.close();
  if (sent && isSame(next, sent.frame)) return editor.open(next.size, sent.boxes); // its label was taken back
  const found = next.found.map((one) => {
    const [left, top, right, bottom] = one.box.map((x, side) => Math.min(next.size[side % 2], Math.max(0, x)));
    return { name: one.class, left, top, right, bottom, guessed: true };
  });
  return editor.open(next.size, found.filter((box) => box.right - box.left >= 1 && box.bottom - box.top >= 1));
}

function drawFrame() {
  // The frame that somebody looks at stays until it is labelled, skipped or too old.
  const same = now.waiting.find((one) => isSame(one, shown));
  const next = same || now.waiting.find((one) => one.left_s > ENOUGH_S) || now.waiting[0] || null;
  const boxes = findsBoxes(), isNew = Boolean(next) !== Boolean(shown) || !isSame(next, shown);
  const hasFailed = next && at("frozen").complete && !at("frozen").naturalWidth;
  if (!isSame(next, shown) || hasFailed) {
    if (shown && !same && !busy) swapped = performance.now();
    if (next) {
      at("frozen").src = address("/frame", next);
      at("frozen").alt = `Frame ${next.frame} of camera ${next.camera}`;
    } else {
      at("frozen").removeAttribute("src");
    }
  }
  shown = next;
  at("frozen").hidden = !isThere();
  at("nothing").hidden = isThere();
  at("nothing").textContent = next ? "The picture is on its way." : "No frame waits for a label yet.";
  at("question").textContent = boxes ? "What is where?" : "What is this?";
  for (const id of ["boxes", "drawn", "done", "add", "remove", "how"]) at(id).toggleAttribute("hidden", !boxes || !isThere());
  at("guess").replaceChildren();
  if (boxes && next) {
    at("guess").textContent = next.found.length
      ? `The model found ${next.found.length}, marked with ?. ${now.num_waiting} wait.`
      : `The model found nothing here. ${now.num_waiting} wait.`;
  } else if (next && next.answer) {
    const name = document.createElement("b");
    name.textContent = apart(next.answer.class);
    at("guess").append("The model says ", name, `, ${percent(next.answer.confidence)} sure. ${now.num_waiting} wait.`);
  } else if (next) {
    at("guess").textContent = `No model answers yet. ${now.num_waiting} wait.`;
  }
  if (next && next.left_s < 20) at("guess").append(` This frame is forgotten in ${Math.ceil(next.left_s)} s.`);
  for (const button of at("classes").children) {
    button.setAttribute("aria-disabled", !isSeen()); // one that is disabled loses the focus with each label
    button.classList.toggle("guessed", Boolean(!boxes && next && next.answer) && button.dataset.class === next.answer.class);
  }
  at("skip").disabled = !next;
  at("undo").disabled = !now.undo;
  if (boxes) isNew ? openBoxes(next) : drawEditor(editor);
}

function drawLive() {
  for (const camera of now.cameras) {
    let figure = [...at("cameras").children].find((one) => one.dataset.camera === camera.name);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.camera = camera.name;
      const picture = document.createElement("img");
      picture.alt = `Live picture of camera ${camera.name}`;
      picture.onerror = () => { picture.alt = `No live picture of camera ${camera.name}; if many are open elsewhere, close one, and load this page again`; };
      picture.src = `/live?${new URLSearchParams({ camera: camera.name })}`;
      figure.append(picture, document.createElement("figcaption"));
      at("cameras").append(figure);
    }
    const said = camera.answers.map((one) => `${apart(one.class)} ${percent(one.confidence)}`).join(", ");
    const isStill = camera.age_s > STILL_S; // its newest picture isn't what it sees now
    figure.classList.toggle("still", isStill);
    figure.lastChild.textContent = `${camera.name}: ${isStill ? `no picture for ${Math.round(camera.age_s)} s` : said || "no answer"}`;
  }
}

function spoken(version) { // as logs and status write it
  const epoch = Math.floor(version / 2 ** 32), counter = version % 2 ** 32;
  return epoch ? `${epoch}/${counter}` : `${counter}`;
}

function draw() {
  document.title = `${now.client} · Label studio`;
  at("where").textContent = `${now.client}, ${now.round < 0 ? "no round yet" : `round ${now.round}`}, ` +
    (now.version > 0 ? `version ${spoken(now.version)}` : "no model yet");
  at("keep").textContent = `${now.keep_s} s`;
  at("remote").hidden = !now.remote;
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
  const number = ++asked;
  try {
    const answer = await fetch("/api/state"), found = await answer.json();
    if (number < answered) return; // what was asked later came first
    answered = number;
    if (!answer.ok) {
      isAway = true;
      return say(found.error, true);
    }
    if (now && found.session !== now.session) { // restarted: its frames have the numbers of others
      shown = sent = null;
      at("cameras").replaceChildren();
    }
    if (number >= undone) { // what was taken back comes first, in place of what came after it
      shown = null;
      undone = Infinity;
    }
    now = found;
    if (isAway) say("");
    isAway = false;
    draw();
  } catch {
    isAway = true;
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
    if (answer.ok && path === "/api/undo") undone = asked + 1;
    await look();
  } catch {
    say("The device doesn't answer; nothing was labelled.", true);
  } finally {
    busy = false;
  }
}

const ask = (path, more) => shown && post(path, { camera: shown.camera, frame: shown.frame, session: now.session || "", ...more });
const choose = (name) => findsBoxes() ? (editor.rename(name), drawEditor(editor)) : isSeen() && ask("/api/label", { class: name });
const skip = () => ask("/api/skip", {});
const undo = () => (findsBoxes() && editor.undo()) || (now && now.undo && post("/api/undo", {}));

function learnBoxes() {
  if (at("done").disabled || !isSeen()) return;
  sent = { frame: shown, boxes: editor.boxes };
  ask("/api/boxes", { boxes: editor.boxes.map((one) => ({ class: one.name, box: [one.left, one.top, one.right, one.bottom] })) });
}

at("frozen").addEventListener("load", () => {
  at("frozen").parentElement.style.aspectRatio = `${at("frozen").naturalWidth} / ${at("frozen").naturalHeight}`;
  draw();
  if (findsBoxes()) editor.draw();
});
for (const [id, act] of [["skip", skip], ["undo", undo], ["done", learnBoxes], ["add", () => editor.add()], ["remove", () => editor.remove()]]) {
  at(id).addEventListener("click", act);
}

// What a key does where boxes are learned; whether it does anything.
function boxKey(event) {
  const acts = { n: () => at("add").disabled || editor.add(), "[": () => editor.next(-1), "]": () => editor.next(1), Delete: () => editor.remove(), Backspace: () => editor.remove() };
  if (event.key.startsWith("Arrow") && editor.chosen >= 0) editor.nudge(event.key, event.shiftKey);
  else if (event.key === "Enter" && event.target.tagName !== "BUTTON") learnBoxes();
  else if (acts[event.key]) acts[event.key]();
  else return false;
  return true;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !now) return;
  if (findsBoxes() && shown && boxKey(event)) return event.preventDefault();
  if (event.repeat) return;
  const index = KEYS.indexOf(event.key);
  if (index >= 0 && index < now.classes.length) choose(now.classes[index]);
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
