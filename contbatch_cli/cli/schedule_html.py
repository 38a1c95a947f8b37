"""Schedules as one self-contained page: the same panels as the SVG picture, with zoom, hover and no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from contbatch_cli.cli.schedule_lanes import ScheduleChart
from contbatch_cli.cli.schedule_svg import DARK, LIGHT


def draw_html(charts: Sequence[ScheduleChart]) -> str:
    """The page. Names of rows reach it as data only, never as markup."""
    data = json.dumps([_chart_data(chart) for chart in charts], separators=(",", ":"), ensure_ascii=False)
    page = _PAGE.replace("@TITLE@", escape(", ".join(chart.title for chart in charts)))
    page = page.replace("@LIGHT@", _variables(LIGHT)).replace("@DARK@", _variables(DARK))
    return page.replace("@DATA@", data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


def _chart_data(chart: ScheduleChart) -> dict[str, Any]:
    """Segments and steps as flat lists of numbers: state, start, end, tokens; and start, end, decodes, prefill, blocks, ..."""
    return {
        "title": chart.title,
        "names": [lane.name for lane in chart.lanes.values()],
        "lanes": [[_short(value) for segment in lane.segments for value in segment] for lane in chart.lanes.values()],
        "steps": [_short(value) for step in chart.steps for value in step],
        "budget": chart.token_budget,
        "blocks": chart.num_blocks,
        "end": chart.end_s,
    }


def _short(value: float) -> float | int:
    return round(value, 6) if isinstance(value, float) else int(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>@TITLE@</title>
<style>
:root{color-scheme:light dark;@LIGHT@}
@media (prefers-color-scheme:dark){:root{@DARK@}}
body{margin:0;padding:14px 18px;background:var(--bg);color:var(--ink);font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
h2{font-size:15px;margin:14px 0 4px}
canvas{display:block;width:100%;cursor:crosshair;touch-action:none}
#legend{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center}
#legend i{display:inline-block;width:14px;height:11px;border-radius:2px;margin-right:5px}
#legend span.help{color:var(--dim)}
button,label{font:inherit;color:inherit}
#tip{position:fixed;pointer-events:none;display:none;background:var(--panel);border:1px solid var(--grid);border-radius:5px;
padding:6px 9px;max-width:340px;white-space:pre-line;box-shadow:0 2px 10px #0004;font-variant-numeric:tabular-nums}
</style></head><body>
<div id="legend"></div><div id="charts"></div><div id="tip" role="status"></div>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const charts = JSON.parse(document.getElementById("data").textContent);
const STATES = ["waiting", "prefill", "decode", "stalled", "preempted"];
const SEG = 4, STEP = 7, LEFT = 130, RIGHT = 16, STEPS_H = 130, CACHE_H = 70, AXIS_H = 22, GAP = 14;
const END = Math.max(...charts.map(c => c.end), 1e-6);
let from = 0, to = END, onlyActive = true, color = {};
const tip = document.getElementById("tip");

function seconds(v) {
  if (v < 1e-3) return (v * 1e6).toFixed(0) + " us";
  if (v < 1) return (v * 1e3).toPrecision(3) + " ms";
  return v < 100 ? v.toPrecision(4) + " s" : v.toFixed(1) + " s";
}

function counted(n, noun) {
  return n.toLocaleString("en") + " " + noun + (n === 1 ? "" : "s");
}

function legend() {
  const box = document.getElementById("legend");
  const words = ["waits", "prefill", "decode", "stalled: holds its cache, gets no token", "preempted"];
  STATES.forEach((state, index) => {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = `var(--${state})`;
    item.append(mark, words[index]);
    box.append(item);
  });
  const label = document.createElement("label"), check = document.createElement("input");
  check.type = "checkbox"; check.checked = onlyActive;
  check.onchange = () => { onlyActive = check.checked; drawAll(); };
  label.append(check, " only rows that run in view");
  const reset = document.createElement("button");
  reset.textContent = "whole run"; reset.onclick = () => setView(0, END);
  const help = document.createElement("span");
  help.className = "help"; help.textContent = "wheel: zoom, drag: move, double click: whole run, keys: + - \\u2190 \\u2192 0";
  box.append(label, reset, help);
}

function setView(a, b) {
  const span = Math.min(Math.max(b - a, END * 1e-5), END);
  from = Math.min(Math.max(a, 0), END - span); to = from + span;
  tip.style.display = "none";
  requestAnimationFrame(drawAll);
}

function zoom(at, factor) { setView(at - (at - from) * factor, at + (to - at) * factor); }

class Chart {
  constructor(data) {
    this.data = data;
    this.numSteps = data.steps.length / STEP;
    this.lanesH = Math.max(40, Math.min(data.lanes.length * 17, 420));
    const head = document.createElement("h2");
    head.textContent = data.title;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", data.title);
    document.getElementById("charts").append(head, this.canvas);
    this.stepsTop = this.lanesH + GAP;
    this.cacheTop = this.stepsTop + STEPS_H + GAP;
    this.height = this.cacheTop + CACHE_H + AXIS_H;
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    let held = null;
    canvas.addEventListener("wheel", e => { e.preventDefault(); zoom(this.time(e.offsetX), Math.exp(e.deltaY * 0.0015)); },
      { passive: false });
    canvas.addEventListener("pointerdown", e => { held = { x: e.offsetX, from, to }; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", e => {
      if (!held) return this.hover(e);
      const by = (held.x - e.offsetX) / this.plot * (held.to - held.from);
      setView(held.from + by, held.to + by);
    });
    canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
    canvas.addEventListener("dblclick", () => setView(0, END));
  }

  time(x) { return from + (x - LEFT) / this.plot * (to - from); }
  x(t) { return LEFT + (t - from) / (to - from) * this.plot; }

  draw() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.plot = Math.max(width - LEFT - RIGHT, 50);
    this.canvas.style.height = this.height + "px";
    this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(this.height * ratio);
    const g = this.g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "11px system-ui,'Segoe UI',Helvetica,Arial,sans-serif";
    g.textBaseline = "middle";
    g.fillStyle = color.panel;
    for (const [top, h] of [[0, this.lanesH], [this.stepsTop, STEPS_H], [this.cacheTop, CACHE_H]]) g.fillRect(LEFT, top, this.plot, h);
    this.axis();
    g.save(); g.beginPath(); g.rect(LEFT, 0, this.plot, this.height); g.clip();
    this.lanes(); this.steps();
    g.restore();
    this.labels();
  }

  axis() {
    const g = this.g, span = to - from, rough = span / 9, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    g.textAlign = "center";
    for (let i = Math.ceil(from / step); i * step <= to; i++) {
      const x = this.x(i * step);
      g.fillStyle = color.grid; g.fillRect(x, 0, 1, this.height - AXIS_H);
      g.fillStyle = color.dim; g.fillText((i * step).toFixed(digits) + " s", x, this.height - AXIS_H / 2);
    }
  }

  visible() {
    const { lanes } = this.data, found = [];
    for (let i = 0; i < lanes.length; i++) {
      const s = lanes[i];
      const first = s.length > SEG && s[0] === 0 ? s[2] : s[1];
      if (!onlyActive || (first < to && s[s.length - 2] > from)) found.push(i);
    }
    return found;
  }

  lanes() {
    const g = this.g;
    this.shown = this.visible();
    this.laneH = Math.min(17, this.lanesH / Math.max(this.shown.length, 1));
    const gap = this.laneH >= 6 ? 2 : this.laneH >= 3 ? 0.5 : 0;
    for (let state = 0; state < STATES.length; state++) {
      g.fillStyle = color[STATES[state]];
      this.shown.forEach((lane, row) => {
        const s = this.data.lanes[lane], y = row * this.laneH + gap / 2, h = Math.max(this.laneH - gap, 0.75);
        for (let k = 0; k < s.length; k += SEG) {
          if (s[k] !== state || s[k + 2] < from || s[k + 1] > to) continue;
          const x = this.x(s[k + 1]), w = this.x(s[k + 2]) - x;
          g.fillRect(x, y, Math.max(state === 1 && w > 3 ? w - 0.7 : w, 0.5), h);
        }
      });
    }
  }

  steps() {
    const s = this.data.steps, budget = Math.max(this.data.budget, 1), blocks = Math.max(this.data.blocks, 1);
    const columns = Array.from({ length: Math.ceil(this.plot) }, () => null);
    for (let i = this.stepAt(from); i < this.numSteps && s[i * STEP] < to; i++) {
      const k = i * STEP, x0 = this.x(s[k]), x1 = this.x(s[k + 1]);
      if (x1 - x0 >= 1) { this.bar(x0, x1 - x0 - (x1 - x0 > 4 ? 0.7 : 0), s[k + 2], s[k + 3], s[k + 4], budget, blocks); continue; }
      const at = Math.min(Math.max(Math.floor(x0 - LEFT), 0), columns.length - 1), c = columns[at] ||= [0, 0, 0, 0];
      const w = s[k + 1] - s[k] || 1e-9;
      c[0] += w; c[1] += w * s[k + 2]; c[2] += w * s[k + 3]; c[3] += w * s[k + 4];
    }
    columns.forEach((c, at) => { if (c) this.bar(LEFT + at, 1, c[1] / c[0], c[2] / c[0], c[3] / c[0], budget, blocks); });
    const g = this.g;
    g.strokeStyle = color.ink; g.setLineDash([5, 4]); g.beginPath();
    for (const y of [this.stepsTop + 8, this.cacheTop + 8]) { g.moveTo(LEFT, y); g.lineTo(LEFT + this.plot, y); }
    g.stroke(); g.setLineDash([]);
  }

  bar(x, w, decodes, prefill, used, budget, blocks) {
    const g = this.g, scale = (STEPS_H - 8) / budget, bottom = this.stepsTop + STEPS_H;
    g.fillStyle = color.decode; g.fillRect(x, bottom - decodes * scale, w, decodes * scale);
    g.fillStyle = color.prefill; g.fillRect(x, bottom - (decodes + prefill) * scale, w, prefill * scale);
    const h = used / blocks * (CACHE_H - 8);
    g.fillStyle = color.cache; g.fillRect(x, this.cacheTop + CACHE_H - h, w, h);
  }

  stepAt(t) {
    let low = 0, high = this.numSteps;
    while (low < high) { const mid = (low + high) >> 1; if (this.data.steps[mid * STEP + 1] <= t) low = mid + 1; else high = mid; }
    return low;
  }

  labels() {
    const g = this.g;
    g.textAlign = "right"; g.fillStyle = color.dim;
    if (this.laneH >= 10) this.shown.forEach((lane, row) => {
      const name = this.data.names[lane];
      g.fillText(name.length > 19 ? name.slice(0, 18) + "\\u2026" : name, LEFT - 7, (row + 0.5) * this.laneH);
    });
    else g.fillText(counted(this.shown.length, "row"), LEFT - 7, 10);
    g.fillText("budget " + this.data.budget.toLocaleString("en"), LEFT - 7, this.stepsTop + 8);
    g.fillText("tokens a step", LEFT - 7, this.stepsTop + STEPS_H - 7);
    g.fillText(counted(this.data.blocks, "block"), LEFT - 7, this.cacheTop + 8);
    g.fillText("cache in use", LEFT - 7, this.cacheTop + CACHE_H - 7);
  }

  hover(e) {
    const t = this.time(e.offsetX);
    const words = t < from || t > to ? "" : e.offsetY < this.lanesH ? this.laneWords(t, e.offsetY) : this.stepWords(t);
    tip.style.display = words ? "block" : "none";
    if (!words) return;
    tip.textContent = words;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = Math.min(e.clientX + 14, innerWidth - wide - 8) + "px";
    tip.style.top = Math.min(e.clientY + 14, innerHeight - high - 8) + "px";
  }

  laneWords(t, y) {
    const lane = this.shown[Math.floor(y / this.laneH)], s = this.data.lanes[lane];
    if (!s) return "";
    for (let k = 0; k < s.length; k += SEG) if (s[k + 1] <= t && t < s[k + 2]) {
      const tokens = s[k + 3] ? `\\n${counted(s[k + 3], "token")}` : "";
      return `${this.data.names[lane]}: ${STATES[s[k]]}\\n${seconds(s[k + 1])} to ${seconds(s[k + 2])}${tokens}`;
    }
    return `${this.data.names[lane]}: done`;
  }

  stepWords(t) {
    const i = this.stepAt(t), s = this.data.steps, k = i * STEP;
    if (i >= this.numSteps) return "";
    return `iteration ${i.toLocaleString("en")}: ${seconds(s[k])}, took ${seconds(s[k + 1] - s[k])}\\n` +
      `${counted(s[k + 2], "decode")}, ${counted(s[k + 3], "prefill token")} of ${this.data.budget}\\n` +
      `${s[k + 4]} of ${counted(this.data.blocks, "block")}\\n` +
      `${s[k + 5]} running, ${s[k + 6]} waiting`;
  }
}

legend();
const views = charts.map(data => new Chart(data));
function drawAll() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "dim", "grid", "panel", "cache", ...STATES]) color[name] = style.getPropertyValue("--" + name).trim();
  views.forEach(view => view.draw());
}
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("keydown", e => {
  const span = to - from, middle = (from + to) / 2;
  const act = { "+": () => zoom(middle, 0.6), "=": () => zoom(middle, 0.6), "-": () => zoom(middle, 1 / 0.6),
    "0": () => setView(0, END), ArrowLeft: () => setView(from - span / 5, to - span / 5),
    ArrowRight: () => setView(from + span / 5, to + span / 5) }[e.key];
  if (act) { e.preventDefault(); act(); }
});
drawAll();
</script></body></html>
"""
