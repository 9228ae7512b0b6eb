// A curve in SVG. Down-sampling keeps the lowest and highest value of every bucket, so a spike never disappears; values that are not finite are shown as marks.

import { make, shape } from "./dom.js";
import { amount, count, say } from "./text.js";

const WIDTH = 760;
const HEIGHT = 300;
const LEFT = 62;
const RIGHT = 14;
const TOP = 14;
const BOTTOM = 34;
const POINTS_MAX = 1400; // about two a pixel

/** Points are [globalStep, value, attempt, timeMs] by rising step. */
export class Chart {
  constructor(label) {
    this.points = [];
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
    this.note = make("p", { class: "why", role: "status" });
    this.element = make("figure", {}, this.svg, this.note);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.render());
    this.scheduled = false;
    this.render();
  }

  set(points) {
    this.points = thin(points, POINTS_MAX);
    this.later();
  }

  /** One new sample; what an earlier attempt did beyond it no longer counts. */
  add(point) {
    while (this.points.length && this.points.at(-1)[0] >= point[0]) {
      if (this.points.at(-1)[2] >= point[2] && this.points.at(-1)[0] === point[0]) return;
      if (this.points.at(-1)[2] > point[2]) return;
      this.points.pop();
    }
    this.points.push(point);
    if (this.points.length > 2 * POINTS_MAX) this.points = thin(this.points, POINTS_MAX);
    this.later();
  }

  later() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.render();
    });
  }

  render() {
    const finite = this.points.filter((point) => typeof point[1] === "number");
    const lost = this.points.length - finite.length;
    this.note.textContent = this.points.length === 0 ? say("noPoints") : lost ? say("nan", { n: count(lost) }) : "";
    this.svg.replaceChildren();
    this.svg.toggleAttribute("hidden", !this.points.length);
    if (!this.points.length) return;
    const steps = [this.points[0][0], Math.max(this.points.at(-1)[0], this.points[0][0] + 1)];
    const values = finite.length ? range(finite.map((point) => point[1])) : [0, 1];
    this.x = (step) => LEFT + ((step - steps[0]) / (steps[1] - steps[0])) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((value - values[0]) / (values[1] - values[0])) * (HEIGHT - TOP - BOTTOM);
    this.axes(steps, values);
    this.curve();
  }

  axes(steps, values) {
    for (const value of ticks(values, 5)) {
      this.svg.append(shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(value), y2: this.y(value), class: "axis" }));
      this.svg.append(shape("text", { x: LEFT - 8, y: this.y(value) + 4, "text-anchor": "end" }, amount(value)));
    }
    for (const step of ticks(steps, 5)) {
      this.svg.append(shape("text", { x: this.x(step), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, count(step)));
    }
    this.svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, say("step")));
  }

  curve() {
    let path = "";
    let open = false;
    let attempt = this.points[0][2];
    for (const [step, value, number] of this.points) {
      if (number !== attempt) {
        attempt = number;
        this.svg.append(shape("line", { x1: this.x(step), x2: this.x(step), y1: TOP, y2: HEIGHT - BOTTOM, class: "attempt" }));
        this.svg.append(shape("text", { x: this.x(step) + 4, y: TOP + 10 }, `${say("attempt")} ${attempt}`));
      }
      if (typeof value !== "number") {
        this.svg.append(shape("line", { x1: this.x(step), x2: this.x(step), y1: HEIGHT - BOTTOM - 9, y2: HEIGHT - BOTTOM, class: "nan" }));
        open = false;
        continue;
      }
      path += `${open ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`;
      open = true;
    }
    this.svg.append(shape("path", { d: path, class: "curve" }));
    const last = this.points.findLast((point) => typeof point[1] === "number");
    if (last) this.svg.append(shape("circle", { cx: this.x(last[0]), cy: this.y(last[1]), r: 3, class: "dot" }));
  }

  point(event) {
    if (!this.points.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const nearest = this.points.reduce((best, point) => (Math.abs(this.x(point[0]) - at) < Math.abs(this.x(best[0]) - at) ? point : best));
    this.svg.querySelector(".cursor")?.remove();
    this.svg.append(shape("line", { x1: this.x(nearest[0]), x2: this.x(nearest[0]), y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" }));
    this.note.textContent = `${say("step")} ${count(nearest[0])} · ${amount(nearest[1])} · ${say("attempt")} ${nearest[2]}`;
  }
}

/** At most `most` points: of every bucket the lowest, the highest, and one that is not finite. */
export function thin(points, most) {
  if (points.length <= most) return points;
  const size = points.length / Math.floor(most / 3);
  const kept = new Set();
  for (let start = 0; start < points.length; start += size) {
    const bucket = points.slice(Math.floor(start), Math.floor(start + size));
    const finite = bucket.filter((point) => typeof point[1] === "number");
    if (finite.length) {
      kept.add(finite.reduce((low, point) => (point[1] < low[1] ? point : low)));
      kept.add(finite.reduce((high, point) => (point[1] > high[1] ? point : high)));
    }
    const odd = bucket.find((point) => typeof point[1] !== "number");
    if (odd) kept.add(odd);
  }
  kept.add(points.at(-1));
  return points.filter((point) => kept.has(point));
}

function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const pad = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - pad, high + pad];
}

function ticks([low, high], wanted) {
  const rough = (high - low) / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough) || rough;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step * 1e-9 ? 0 : Number(value.toPrecision(12)));
  return found;
}
