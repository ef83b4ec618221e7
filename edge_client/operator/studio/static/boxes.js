"use strict";
// Boxes over the frozen frame, in pixels of the picture: drawn, moved and resized by pointer or keys.
const SVG = "http://www.w3.org/2000/svg";
const HANDLES = [["left", "top"], ["right", "top"], ["left", "bottom"], ["right", "bottom"]];
const SMALLEST = 3;

class BoxEditor {
  constructor(svg, whenChanged) {
    this.svg = svg;
    this.whenChanged = whenChanged;
    this.close();
    svg.addEventListener("pointerdown", (event) => this.begin(event));
    svg.addEventListener("pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel"]) svg.addEventListener(kind, () => this.end());
  }

  // boxes: [{name, left, top, right, bottom, guessed}]
  open(size, boxes) {
    [this.width, this.height] = size;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.boxes = boxes.map((one) => ({ ...one }));
    this.chosen = -1;
    this.before = [];
    this.drag = null;
    this.draw();
  }

  close() {
    this.open([1, 1], []);
  }

  point(event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    return [Math.min(this.width, Math.max(0, at.x)), Math.min(this.height, Math.max(0, at.y))];
  }

  remember() {
    this.before.push(JSON.stringify(this.boxes));
    if (this.before.length > 100) this.before.shift();
  }

  undo() {
    if (!this.before.length) return false;
    this.boxes = JSON.parse(this.before.pop());
    this.chosen = Math.min(this.chosen, this.boxes.length - 1);
    this.draw();
    return true;
  }

  begin(event) {
    if (event.button || !this.name) return;
    event.preventDefault();
    this.svg.setPointerCapture(event.pointerId);
    const [x, y] = this.point(event), { index, handle } = event.target.dataset;
    this.remember();
    this.drag = { x, y, moved: false };
    if (handle !== undefined) {
      this.drag.sides = HANDLES[handle];
    } else if (index !== undefined) {
      this.chosen = Number(index);
      this.drag.whole = true;
    } else {
      this.boxes.push({ name: this.name, left: x, top: y, right: x, bottom: y });
      this.chosen = this.boxes.length - 1;
      this.drag.fresh = true;
    }
    this.draw();
  }

  move(event) {
    if (!this.drag) return;
    const [x, y] = this.point(event), box = this.boxes[this.chosen], drag = this.drag;
    if (drag.fresh) {
      [box.left, box.right] = [Math.min(drag.x, x), Math.max(drag.x, x)];
      [box.top, box.bottom] = [Math.min(drag.y, y), Math.max(drag.y, y)];
    } else if (drag.sides) {
      this.pull(box, drag.sides[0], x);
      this.pull(box, drag.sides[1], y);
    } else {
      this.shift(box, x - drag.x, y - drag.y);
      [drag.x, drag.y] = [x, y];
    }
    drag.moved = true;
    box.guessed = false;
    this.draw();
  }

  end() {
    const drag = this.drag, box = this.boxes[this.chosen];
    if (!drag) return;
    this.drag = null;
    if (drag.fresh && Math.min(box.right - box.left, box.bottom - box.top) < SMALLEST) {
      this.boxes.pop(); // a click beside all boxes chooses none
      this.chosen = -1;
      this.before.pop();
    } else if (!drag.moved) {
      this.before.pop();
    }
    this.draw();
  }

  pull(box, side, to) {
    const most = { left: box.right - SMALLEST, top: box.bottom - SMALLEST, right: this.width, bottom: this.height };
    const least = { left: 0, top: 0, right: box.left + SMALLEST, bottom: box.top + SMALLEST };
    box[side] = Math.max(least[side], Math.min(most[side], to));
  }

  shift(box, x, y) {
    x = Math.max(-box.left, Math.min(this.width - box.right, x));
    y = Math.max(-box.top, Math.min(this.height - box.bottom, y));
    box.left += x; box.right += x; box.top += y; box.bottom += y;
  }

  add() {
    this.remember();
    const { width, height } = this;
    this.boxes.push({ name: this.name, left: width * 3 / 8, top: height * 3 / 8, right: width * 5 / 8, bottom: height * 5 / 8 });
    this.chosen = this.boxes.length - 1;
    this.draw();
  }

  next(step) {
    if (!this.boxes.length) return;
    this.chosen = this.chosen < 0 ? 0 : (this.chosen + step + this.boxes.length) % this.boxes.length;
    this.draw();
  }

  nudge(key, resizes) {
    const box = this.boxes[this.chosen], by = Math.max(1, Math.round(this.width / 100));
    const [x, y] = { ArrowLeft: [-by, 0], ArrowRight: [by, 0], ArrowUp: [0, -by], ArrowDown: [0, by] }[key];
    this.remember();
    if (resizes) {
      this.pull(box, "right", box.right + x);
      this.pull(box, "bottom", box.bottom + y);
    } else {
      this.shift(box, x, y);
    }
    box.guessed = false;
    this.draw();
  }

  rename(name) {
    this.name = name;
    const box = this.boxes[this.chosen];
    if (!box || (box.name === name && !box.guessed)) return;
    this.remember();
    Object.assign(box, { name, guessed: false });
    this.draw();
  }

  remove() {
    if (this.chosen < 0) return;
    this.remember();
    this.boxes.splice(this.chosen, 1);
    this.chosen = -1;
    this.draw();
  }

  part(kind, facts, box) {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(facts)) element.setAttribute(name, value);
    if (box) element.classList.toggle("guessed", Boolean(box.guessed));
    return element;
  }

  draw() {
    const unit = this.width / (this.svg.clientWidth || 640); // pixels of the picture in one of the screen
    const drawn = this.boxes.flatMap((box, index) => {
      const chosen = index === this.chosen;
      const x = box.left, y = box.top, width = box.right - x, height = box.bottom - y;
      const rect = this.part("rect", { x, y, width, height, "data-index": index }, box);
      rect.classList.toggle("chosen", chosen);
      const above = y > 20 * unit ? y - 5 * unit : y + 16 * unit;
      const word = this.part("text", { x: x + 2 * unit, y: above, "font-size": 14 * unit, "stroke-width": 3 * unit });
      word.textContent = box.name + (box.guessed ? "?" : "");
      const handles = !chosen ? [] : HANDLES.map(([side, end], handle) =>
        this.part("circle", { cx: box[side], cy: box[end], r: Math.max(3 * unit, Math.min(7 * unit, width / 5, height / 5)), "data-handle": handle }));
      return [rect, word, ...handles];
    });
    this.svg.replaceChildren(...drawn);
    this.whenChanged(this);
  }
}
