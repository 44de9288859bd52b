"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const PALETTE = ["#2f6fde", "#e07b1a", "#2a9d6f", "#c2367b", "#8458c9", "#b58900", "#17a2b8", "#d1495b", "#5b8c2a", "#7a6a58", "#4a6fa5", "#ef9a9a"];
const color = (i) => PALETTE[i % PALETTE.length];
const SHAPES = ["circle", "square", "diamond", "triangle"];

function el(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function svg(tag, attrs = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const NAMES = {
  psnr: "PSNR", ssim: "SSIM", ms_ssim: "MS-SSIM", lpips: "LPIPS", kv_bytes: "stored KV", kv_peak_bytes: "peak KV",
  chunk_ms: "chunk", chunk_ms_p95: "chunk p95", first_frame_ms: "first frame", denoise_ms: "denoising", context_ms: "context pass",
  decode_ms: "decoding", fps_steady: "frames a second", judge_right: "all right", judge_last: "judge, last segment",
  judge_drift: "judge change", nominal_over_peak: "stored / peak", compute_fraction: "compute", segments: "judge by segment",
};
const title = (name) => NAMES[name] || name.replace(/_/g, " ");
const metric = (name) => D.metrics[name] || { better: "neither", unit: "", text: "", group: "" };

function format(value, name) {
  if (value === null || value === undefined) return "–";
  const unit = metric(name).unit;
  if (unit === "bytes") {
    const size = Math.abs(value);
    for (const [limit, word] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (size >= limit) return trim(value / limit) + " " + word;
    return trim(value) + " B";
  }
  return trim(value);
}
function trim(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.1) return value.toFixed(2);
  if (size >= 0.001) return value.toFixed(3);
  return value.toExponential(1);
}
const half = (stat) => (stat && stat.lo !== null ? stat.mean - stat.lo : null);

function showTip(event, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(6, event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}
function tip(node, text) {
  node.addEventListener("pointermove", (event) => showTip(event, text));
  node.addEventListener("pointerleave", () => ($("tip").hidden = true));
  return node;
}
/** Beyond the palette colours come again, hollow. */
const swatch = (i) => el("span", { class: "swatch", style: i < PALETTE.length ? `background:${color(i)}` : `box-shadow:inset 0 0 0 3px ${color(i)}` });
const present = Object.keys(D.metrics).filter((name) => D.variants.some((v) => v.metrics[name]));
function choose(label, names, value, change) {
  const box = el("select", { onchange: (event) => change(event.target.value) });
  for (const name of names) box.append(el("option", { value: name, ...(name === value ? { selected: "" } : {}) }, title(name)));
  return el("label", {}, label, box);
}

/* ---- header ---- */
$("notes").textContent = D.notes;
for (const [text, bad] of D.chips) $("chips").append(el("li", { class: bad ? "bad" : "" }, text));

/* ---- table ---- */
const table = { group: "summary", paired: false, sort: null, up: false };
function columns() {
  if (table.group === "summary") {
    const saves = D.variants.some((v) => v.metrics.compute_fraction?.mean < 0.999);
    const names = D.summary.filter((name) => present.includes(name) && (saves || name !== "compute_fraction"));
    const at = names.indexOf("judge");
    if (at >= 0 && !table.paired && (D.curves.judge || []).some((c) => c.mean.length > 1)) names.splice(at + 1, 0, "segments");
    return names;
  }
  return present.filter((name) => metric(name).group === table.group);
}
function cellStat(variant, name) {
  return (table.paired ? variant.paired : variant.metrics)[name];
}
function drawTable() {
  const names = columns();
  const order = D.variants.map((_, i) => i);
  if (table.sort) {
    const read = (i) => (table.sort === "label" ? D.variants[i].label : cellStat(D.variants[i], table.sort)?.mean);
    const missing = (value) => value === undefined || value === null;
    order.sort((a, b) => {
      const [x, y] = [read(a), read(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      const way = table.up ? 1 : -1;
      return typeof x === "string" ? way * x.localeCompare(y) : way * (x - y);
    });
  }
  const head = el("tr");
  for (const name of ["label", ...names]) {
    const info = metric(name);
    const sorted = table.sort === name ? (table.up ? "ascending" : "descending") : null;
    const better = { higher: "more is better", lower: "less is better" }[info.better];
    const th = el("th", { scope: "col", tabindex: 0, "aria-sort": sorted }, name === "label" ? "Variant" : title(name));
    if (name === "segments") { head.append(tip(th, "judge score of each segment of the clip, mean over clips; full height is 1")); continue; }
    if (name !== "label") {
      const arrow = { higher: "↑ ", lower: "↓ ", neither: "" }[info.better];
      th.append(el("span", { class: "unit" }, arrow + info.unit + (info.unit ? "" : " ")));
      tip(th, [info.text, better].filter(Boolean).join("\n"));
    }
    const click = () => {
      table.up = table.sort === name ? !table.up : name === "label" || info.better === "lower";
      table.sort = name;
      drawTable();
    };
    th.addEventListener("click", click);
    th.addEventListener("keydown", (event) => event.key === "Enter" && click());
    head.append(th);
  }
  const best = Object.fromEntries(names.map((name) => [name, bestOf(name)]));
  const body = el("tbody");
  for (const i of order) body.append(tableRow(i, names, best));
  $("results").replaceChildren(el("thead", {}, head), body);
}
function bestOf(name) {
  const better = metric(name).better;
  const values = D.variants.map((v) => v.metrics[name]?.mean).filter((v) => v !== undefined);
  if (better === "neither" || values.length < 2) return null;
  const best = better === "higher" ? Math.max(...values) : Math.min(...values);
  return values.every((v) => v === best) ? null : best;
}
/** Judge score of each segment of a clip, as bars. */
function segmentBars(i) {
  const curve = (D.curves.judge || []).find((c) => c.variant === i);
  if (!curve) return "–";
  const wide = Math.max(4, Math.min(12, 84 / curve.mean.length)), tall = 22;
  const root = svg("svg", { class: "bars", viewBox: `0 0 ${wide * curve.mean.length} ${tall}`, width: wide * curve.mean.length, height: tall, role: "img", "aria-label": "judge by segment" });
  curve.mean.forEach((v, k) => {
    root.append(svg("rect", { x: k * wide, y: 0, width: wide - 1.5, height: tall, fill: "var(--grid)" }));
    root.append(svg("rect", { x: k * wide, y: tall * (1 - v), width: wide - 1.5, height: tall * v, fill: color(i) }));
  });
  return tip(root, curve.mean.map((v) => (v === null ? "–" : v.toFixed(2))).join("  "));
}
function tableRow(i, names, best) {
  const variant = D.variants[i];
  const name = el("div", { class: "variant" }, swatch(i), el("span", {}, variant.label));
  const first = el("td", {}, name);
  if (variant.is_reference) name.lastChild.append(el("span", { class: "tag" }, "reference"));
  if (variant.imported) name.lastChild.append(el("span", { class: "tag" }, "imported"));
  if (variant.failed) name.lastChild.append(el("span", { class: "tag bad" }, `${variant.failed} failed`));
  tip(first, `${variant.clips} clips\n` + Object.entries(variant.variant).map(([k, v]) => `${title(k)}: ${v}`).join("\n"));
  const row = el("tr", {}, first);
  for (const name of names) {
    if (name === "segments") { row.append(el("td", {}, segmentBars(i))); continue; }
    const stat = cellStat(variant, name);
    if (!stat) { row.append(el("td", {}, "–")); continue; }
    const sign = table.paired && stat.mean > 0 ? "+" : "";
    const cell = el("td", {}, sign + format(stat.mean, name));
    const spread = half(stat);
    if (spread) cell.append(el("span", { class: "pm" }, "±" + format(spread, name)));
    if (!table.paired && best[name] === stat.mean) cell.className = "best";
    if (table.paired && stat.lo !== null && (stat.lo > 0 || stat.hi < 0) && metric(name).better !== "neither")
      cell.className = (metric(name).better === "higher") === (stat.mean > 0) ? "good" : "worse";
    row.append(cell);
  }
  return row;
}
function tableControls() {
  const groups = ["summary", ...new Set(present.map((name) => metric(name).group))];
  const buttons = groups.map((group) => el("button", { "aria-pressed": group === table.group, onclick: (event) => {
    table.group = group;
    for (const other of buttons) other.setAttribute("aria-pressed", other === event.target);
    drawTable();
  } }, title(group)));
  $("table-controls").append(...buttons);
  if (D.variants.some((v) => Object.keys(v.paired).length))
    $("table-controls").append(el("label", {}, el("input", { type: "checkbox", onchange: (event) => { table.paired = event.target.checked; drawTable(); } }), "difference from the reference, in pairs"));
  $("table-controls").append(el("button", { onclick: saveCsv }, "Save as CSV"));
}
function saveCsv() {
  const quote = (text) => `"${String(text ?? "").replace(/"/g, '""')}"`;
  const lines = [["variant", "clips", "failed", ...present.flatMap((name) => [name, name + "_lo", name + "_hi"])]];
  for (const v of D.variants)
    lines.push([v.label, v.clips, v.failed, ...present.flatMap((name) => ["mean", "lo", "hi"].map((key) => v.metrics[name]?.[key]))]);
  const blob = new Blob([lines.map((line) => line.map(quote).join(",")).join("\n")], { type: "text/csv" });
  el("a", { href: URL.createObjectURL(blob), download: "comparison.csv" }).click();
}

/* ---- plots ---- */
function ticks(lo, hi, count = 5) {
  const raw = (hi - lo || Math.abs(hi) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.99);
  const out = [];
  for (let v = Math.ceil(lo / step - 1e-9) * step; v <= hi + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}
/** Ends of an axis: intervals of few clips may be far wider than the means are apart, so they reach only so far. */
function reach(means, edges) {
  const [lo, hi] = [Math.min(...means), Math.max(...means)];
  const room = 0.4 * (hi - lo || Math.abs(hi) * 0.1 || 1);
  return [...means, Math.max(lo - room, Math.min(...edges, lo)), Math.min(hi + room, Math.max(...edges, hi))];
}
const MARKS = [1, 2, 5].flatMap((m) => [...Array(16).keys()].map((p) => m * 10 ** (p - 3)));
/** Tick labels tell neighbours apart. */
function labels(values, name) {
  if (metric(name).unit !== "bytes" && values.every(Number.isInteger)) return values.map(String);
  const texts = values.map((v) => format(v, name));
  if (metric(name).unit === "bytes" || new Set(texts).size === texts.length) return texts;
  for (let digits = 3; digits < 8; digits++) {
    const longer = values.map((v) => v.toFixed(digits));
    if (new Set(longer).size === longer.length) return longer;
  }
  return texts;
}
function frame(width, height, xs, ys, xName, yName, xLabel) {
  const pad = { left: 56, right: 16, top: 14, bottom: 40 };
  const spread = (values) => {
    let [lo, hi] = [Math.min(...values), Math.max(...values)];
    const room = (hi - lo || Math.abs(hi) * 0.1 || 1) * 0.08;
    return [lo >= 0 && lo - room < 0 ? 0 : lo - room, hi + room];
  };
  // Bytes span decades between codecs: then equal steps are equal factors.
  const wide = !xLabel && Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) > 6;
  const along = wide ? Math.log : (v) => v;
  const [x0, x1] = xLabel ? [Math.min(...xs), Math.max(...xs)] : spread(xs.map(along));
  const [y0, y1] = spread(ys);
  const clamp = (v, lo, hi) => Math.max(lo, Math.min(hi, v));
  const share = (v) => ((wide && v <= 0 ? x0 : along(v)) - x0) / (x1 - x0 || 1);
  const x = (v) => clamp(pad.left + share(v) * (width - pad.left - pad.right), pad.left, width - pad.right);
  const y = (v) => clamp(height - pad.bottom - ((v - y0) / (y1 - y0 || 1)) * (height - pad.top - pad.bottom), pad.top, height - pad.bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title(yName)} against ${title(xName)}` });
  const yMarks = ticks(y0, y1);
  const xMarks = wide ? MARKS.filter((m) => along(m) >= x0 && along(m) <= x1) : ticks(x0, x1, 4);
  const [yTexts, xTexts] = [labels(yMarks, yName), labels(xMarks, xName)];
  yMarks.forEach((t, k) => {
    root.append(svg("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: y(t), y2: y(t) }));
    root.append(svg("text", { x: pad.left - 7, y: y(t) + 4, "text-anchor": "end" }, yTexts[k]));
  });
  xMarks.forEach((t, k) => {
    root.append(svg("line", { class: "grid", x1: x(t), x2: x(t), y1: pad.top, y2: height - pad.bottom }));
    root.append(svg("text", { x: x(t), y: height - pad.bottom + 16, "text-anchor": "middle" }, xTexts[k]));
  });
  const unit = metric(xName).unit && metric(xName).unit !== "bytes" ? ` (${metric(xName).unit})` : "";
  root.append(svg("text", { x: (width + pad.left) / 2, y: height - 5, "text-anchor": "middle" }, xLabel || title(xName) + unit));
  return { root, x, y, pad };
}
function mark(shape, x, y, fill) {
  const r = 5.5;
  const common = { fill, stroke: "var(--paper)", "stroke-width": 1.2 };
  if (shape === "circle") return svg("circle", { cx: x, cy: y, r, ...common });
  const points = { square: [[-r, -r], [r, -r], [r, r], [-r, r]], diamond: [[0, -r - 1.5], [r + 1.5, 0], [0, r + 1.5], [-r - 1.5, 0]], triangle: [[0, -r - 1], [r + 1, r], [-r - 1, r]] }[shape];
  return svg("polygon", { points: points.map(([a, b]) => `${x + a},${y + b}`).join(" "), ...common });
}
function front(points, xName, yName) {
  const sign = (name) => (metric(name).better === "higher" ? -1 : 1);
  const cost = (p) => [sign(xName) * p.x.mean, sign(yName) * p.y.mean];
  const beats = (a, b) => a[0] <= b[0] && a[1] <= b[1] && (a[0] < b[0] || a[1] < b[1]);
  return points.filter((p) => !points.some((q) => beats(cost(q), cost(p)))).sort((a, b) => a.x.mean - b.x.mean);
}
function scatter(xName, yName) {
  const points = D.variants.map((v, i) => ({ i, x: v.metrics[xName], y: v.metrics[yName], label: v.label })).filter((p) => p.x && p.y);
  if (!points.length) return el("p", { class: "hint" }, `No variant has both ${title(xName)} and ${title(yName)}.`);
  const wide = 560, tall = 360;
  const barred = points.length <= PALETTE.length;
  const ends = (key) => reach(points.map((p) => p[key].mean), key === "x" || !barred ? [] : points.flatMap((p) => [p[key].lo, p[key].hi]).filter((v) => v !== null));
  const { root, x, y, pad } = frame(wide, tall, ends("x"), ends("y"), xName, yName);
  const line = front(points, xName, yName);
  if (line.length > 1) root.append(svg("polyline", { class: "front", points: line.map((p) => `${x(p.x.mean)},${y(p.y.mean)}`).join(" ") }));
  const taken = points.map((p) => [x(p.x.mean) - 7, y(p.y.mean) - 7, 14, 14]);
  for (const p of points) {
    const [cx, cy] = [x(p.x.mean), y(p.y.mean)];
    const bar = (x1, y1, x2, y2) => root.append(svg("line", { x1, y1, x2, y2, stroke: color(p.i), "stroke-width": 1.3, opacity: 0.55 }));
    if (p.y.lo !== null && barred) bar(cx, y(p.y.lo), cx, y(p.y.hi));
    if (p.x.lo !== null && barred) bar(x(p.x.lo), cy, x(p.x.hi), cy);
    root.append(mark(SHAPES[Math.floor(p.i / PALETTE.length) % 4], cx, cy, color(p.i)));
  }
  for (const p of points) {
    const [cx, cy] = [x(p.x.mean), y(p.y.mean)];
    place(root, taken, p.label.length > 30 ? p.label.slice(0, 29) + "…" : p.label, cx, cy, [pad.left, wide - pad.right, tall - pad.bottom]);
    const info = `${p.label}\n${title(yName)} ${format(p.y.mean, yName)}\n${title(xName)} ${format(p.x.mean, xName)}`;
    root.append(tip(svg("circle", { class: "hit", cx, cy, r: 14 }), info));
  }
  return root;
}
function place(root, taken, text, cx, cy, [left, right, bottom]) {
  const width = text.length * 7;
  const spots = [[10, 4], [-10 - width, 4], [-width / 2, -11], [-width / 2, 20], [10, 18], [10, -9], [-10 - width, 18], [-10 - width, -9]];
  for (let down = 34; down <= 150; down += 16) spots.push([14, down], [-14 - width, down], [14, -down], [-14 - width, -down]);
  for (const [dx, dy] of spots) {
    const box = [cx + dx, cy + dy - 10, width, 13];
    const inside = box[0] >= left && box[0] + width <= right + 12 && box[1] > 0 && cy + dy < bottom;
    const free = taken.every((t) => box[0] > t[0] + t[2] || t[0] > box[0] + box[2] || box[1] > t[1] + t[3] || t[1] > box[1] + box[3]);
    if (!inside || !free) continue;
    taken.push(box);
    if (Math.abs(dy) > 20) root.append(svg("line", { class: "leader", x1: cx, y1: cy, x2: dx > 0 ? box[0] - 2 : box[0] + width + 2, y2: cy + dy - 4 }));
    root.append(svg("text", { class: "name", x: box[0], y: cy + dy }, text));
    return;
  }
}
const pareto = { y: D.quality.find((name) => present.includes(name)), xs: D.costs.filter((name) => present.includes(name)).slice(0, 2) };
function drawPareto() {
  $("pareto-plots").replaceChildren(...pareto.xs.map((name) => el("figure", {}, el("figcaption", {}, `${title(pareto.y)} against ${title(name)}`), scatter(name, pareto.y))));
}
function paretoControls() {
  const judged = present.filter((name) => metric(name).better !== "neither" && metric(name).group !== "cost");
  const costs = present.filter((name) => metric(name).group === "cost");
  $("pareto-controls").append(choose("Quality", judged, pareto.y, (name) => { pareto.y = name; drawPareto(); }));
  pareto.xs.forEach((value, k) => $("pareto-controls").append(choose(k ? "and" : "against", costs, value, (name) => { pareto.xs[k] = name; drawPareto(); })));
}

/* ---- drift ---- */
const BANDS = 8; // of more curves the bands cover one another
const drift = { name: null, hidden: new Set() };
function drawDrift() {
  const curves = D.curves[drift.name].filter((c) => !drift.hidden.has(c.variant));
  const holder = $("drift-plot");
  if (!curves.length) { holder.replaceChildren(el("p", { class: "hint" }, "All curves are hidden.")); return; }
  const known = (list) => list.filter((v) => v !== null);
  const banded = curves.length <= BANDS;
  const values = reach(known(curves.flatMap((c) => c.mean)), banded ? known(curves.flatMap((c) => [...c.lo, ...c.hi])) : []);
  const narrow = innerWidth < 600;
  const { root, x, y } = frame(narrow ? 460 : 1000, narrow ? 300 : 340, curves.flatMap((c) => c.x), values, "seconds", drift.name, "seconds into the clip");
  for (const c of banded ? curves : []) {
    const known = c.x.map((_, k) => k).filter((k) => c.lo[k] !== null);
    if (known.length > 1) {
      const edge = [...known.map((k) => `${x(c.x[k])},${y(c.hi[k])}`), ...known.reverse().map((k) => `${x(c.x[k])},${y(c.lo[k])}`)];
      root.append(svg("polygon", { points: edge.join(" "), fill: color(c.variant), opacity: 0.11 }));
    }
  }
  for (const c of curves) {
    const dash = ["", "6 4", "2 3", "8 3 2 3"][Math.floor(c.variant / PALETTE.length) % 4];
    root.append(svg("polyline", { points: c.x.map((v, k) => `${x(v)},${y(c.mean[k])}`).join(" "), fill: "none", stroke: color(c.variant), "stroke-width": 2.2, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    c.x.forEach((v, k) => {
      root.append(svg("circle", { cx: x(v), cy: y(c.mean[k]), r: 3, fill: color(c.variant) }));
      const spread = c.lo[k] === null ? "" : ` ±${format(c.mean[k] - c.lo[k], drift.name)}`;
      root.append(tip(svg("circle", { class: "hit", cx: x(v), cy: y(c.mean[k]), r: 10 }), `${D.variants[c.variant].label}\n${format(c.mean[k], drift.name)}${spread} at ${trim(v)} s`));
    });
  }
  holder.replaceChildren(root);
}
function driftControls() {
  const names = Object.keys(D.curves);
  drift.name = [...D.quality, "colour_distance", "sharpness"].find((name) => names.includes(name)) || names[0];
  $("drift-controls").append(choose("Figure", names, drift.name, (name) => { drift.name = name; drawDrift(); }));
  $("drift-legend").append(...D.variants.map((v, i) => el("button", { "aria-pressed": true, onclick: (event) => {
    const shown = drift.hidden.delete(i) || (drift.hidden.add(i), false);
    event.currentTarget.setAttribute("aria-pressed", shown);
    drawDrift();
  } }, swatch(i), v.label)));
  const showAll = (on) => {
    D.variants.forEach((_, i) => (on ? drift.hidden.delete(i) : drift.hidden.add(i)));
    for (const button of $("drift-legend").children) button.setAttribute("aria-pressed", on);
    drawDrift();
  };
  $("drift-controls").append(el("button", { onclick: () => showAll(true) }, "Show all"), el("button", { onclick: () => showAll(false) }, "Hide all"));
}

/* ---- start ---- */
const section = (id, wanted, ...draw) => (wanted ? draw.forEach((f) => f()) : $(id).remove());
section("table", D.variants.length, tableControls, drawTable);
section("pareto", pareto.y && pareto.xs.length, paretoControls, drawPareto);
section("drift", Object.keys(D.curves).length, driftControls, drawDrift);
section("clips", D.clips.length, clipControls, drawClips);
section("memory", D.pictures.some((p) => p.regions.length), drawMemory);
section("mass", D.pictures.some((p) => p.attention_mass.length), drawMass);
section("orderings", D.orderings.length, drawOrderings);
section("failures", D.failures.length, drawFailures);
drawCard();
for (const part of document.querySelectorAll("main section")) $("nav").append(el("a", { href: "#" + part.id }, part.dataset.title));
addEventListener("resize", () => Object.keys(D.curves).length && drawDrift());
