"use strict";
// Line charts in SVG: a few hundred points, drawn anew with each event. Arrow keys or a pointer read off the values.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220, LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 24;

function node(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function ticks(low, high, most) {
  const rough = (high - low) / most || 1, scale = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * scale).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + 1e-9 * size; i++) found.push(Number((i * size).toPrecision(10)));
  return found;
}

class Chart {
  // series: [{name, css, data: Map of step → value, counts: Map of step → values that it is the mean of, of: what}]; format: a value as text
  constructor(figure, title, series, format, fromZero) {
    Object.assign(this, { series, format, fromZero, at: null, title });
    this.svg = node("svg", { tabindex: "0", role: "img" });
    this.output = document.createElement("output");
    const caption = document.createElement("figcaption"), names = document.createElement("span");
    for (const s of series) {
      const key = document.createElement("i");
      key.className = `key ${s.css}`;
      const name = document.createElement("b");
      name.textContent = `${s.name} `;
      names.append(key, name, " ");
    }
    caption.append(names, this.output);
    figure.append(caption, this.svg);
    new ResizeObserver(() => this.draw()).observe(figure);
    this.svg.addEventListener("pointermove", (e) => this.read(this.stepAt(e.clientX - this.svg.getBoundingClientRect().left)));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("blur", () => this.read(null));
    this.svg.addEventListener("keydown", (e) => this.key(e));
  }

  steps() {
    return [...new Set(this.series.flatMap((s) => [...s.data.keys()]))].sort((a, b) => a - b);
  }

  key(event) {
    const steps = this.steps(), move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!steps.length || (move === undefined && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const now = this.at === null ? steps.length - 1 : steps.indexOf(nearest(steps, this.at));
    const next = event.key === "Home" ? 0 : event.key === "End" ? steps.length - 1 : now + (this.at === null ? 0 : move);
    this.read(steps[Math.min(Math.max(next, 0), steps.length - 1)]);
  }

  read(step) {
    this.at = step;
    this.draw();
  }

  stepAt(x) {
    const steps = this.steps();
    return steps.length ? nearest(steps, this.low + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.high - this.low)) : null;
  }

  draw() {
    this.width = this.svg.clientWidth || 400;
    const steps = this.steps(), values = this.series.flatMap((s) => [...s.data.values()]);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    if (!values.length) {
      this.svg.setAttribute("aria-label", `${this.title}: no figures yet`);
      this.svg.replaceChildren(node("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no figures yet"));
      return;
    }
    this.low = steps[0];
    this.high = Math.max(steps[steps.length - 1], this.low + 1);
    let [bottom, top] = [this.fromZero ? 0 : Math.min(...values), Math.max(...values)];
    const room = (top - bottom || Math.abs(top) || 1) * 0.06;
    [bottom, top] = [this.fromZero ? 0 : bottom - room, top + room];
    const x = (step) => LEFT + ((step - this.low) / (this.high - this.low)) * (this.width - LEFT - RIGHT);
    const y = (value) => TOP + ((top - value) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const v of ticks(bottom, top, 4)) {
      parts.push(node("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(v), y2: y(v) }));
      parts.push(node("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, this.format(v, true)));
    }
    for (const s of ticks(this.low, this.high, Math.max(2, this.width / 110)))
      if (Number.isInteger(s)) parts.push(node("text", { x: x(s), y: HEIGHT - 6, "text-anchor": "middle" }, s.toLocaleString("en")));
    const said = [];
    for (const { name, css, data, counts, of } of this.series) {
      const points = [...data].sort((a, b) => a[0] - b[0]);
      if (!points.length) continue;
      parts.push(node("path", { class: `s-${css}`, d: points.map(([s, v], i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(v).toFixed(1)}`).join("") }));
      const last = this.at === null ? points[points.length - 1] : points.reduce((a, b) => (Math.abs(b[0] - this.at) < Math.abs(a[0] - this.at) ? b : a));
      parts.push(node("circle", { class: `s-${css}`, cx: x(last[0]), cy: y(last[1]), r: 3.5 }));
      const many = counts?.get(last[0]) ?? 1, mean = many > 1 ? ` (mean of ${many} ${of ?? "step"}s)` : "";
      said.push(`${this.series.length > 1 ? `${name} ` : ""}${this.format(last[1])}${mean}`);
    }
    if (this.at !== null) parts.push(node("line", { class: "cursor", x1: x(this.at), x2: x(this.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.svg.replaceChildren(...parts);
    const step = this.at ?? this.high;
    this.output.textContent = `step ${step.toLocaleString("en")}: ${said.join(", ")}`;
    this.svg.setAttribute("aria-label", `${this.title}, steps ${this.low} to ${this.high}; at ${this.output.textContent}`);
  }
}

function nearest(sorted, value) {
  return sorted.reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a));
}
