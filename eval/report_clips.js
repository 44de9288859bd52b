/* ---- clips on one clock ---- */
const player = { set: 0, videos: [], playing: false, rate: 1, length: 0, fps: 16 };
function clipControls() {
  if (D.clips.length > 1) {
    const box = el("select", { onchange: (event) => { player.set = +event.target.value; drawClips(); } });
    D.clips.forEach((set, k) => box.append(el("option", { value: k }, `${set.prompt.slice(0, 70)} · seed ${set.seed}`)));
    $("clip-controls").append(el("label", {}, "Prompt", box));
  }
  const rate = el("select", { onchange: (event) => { player.rate = +event.target.value; player.videos.forEach((v) => (v.playbackRate = player.rate)); } });
  for (const value of [0.25, 0.5, 1, 2, 4]) rate.append(el("option", { value, ...(value === 1 ? { selected: "" } : {}) }, `${value}×`));
  $("clip-controls").append(el("label", {}, "Speed", rate));
  const play = el("button", { id: "play", onclick: () => setPlaying(!player.playing), "aria-label": "play or pause" }, "▶");
  const step = (n) => el("button", { onclick: () => { setPlaying(false); seek(now() + n / player.fps); }, "aria-label": n < 0 ? "one frame back" : "one frame on" }, n < 0 ? "‹" : "›");
  const bar = el("input", { type: "range", id: "scrub", min: 0, max: 1000, value: 0, "aria-label": "time", oninput: (event) => { setPlaying(false); seek((event.target.value / 1000) * player.length); } });
  $("clip-player").append(play, step(-1), step(1), bar, el("output", { id: "clock" }));
}
const now = () => Math.max(0, ...player.videos.map((v) => v.currentTime));
function seek(seconds) {
  const at = Math.max(0, Math.min(seconds, player.length));
  // Half a frame on: a seek to the very border of two frames may show either.
  player.videos.forEach((v) => (v.currentTime = Math.min(at + 0.5 / player.fps, Math.max(0, (v.duration || at) - 0.5 / player.fps))));
  showClock(at);
}
function showClock(at) {
  $("scrub").value = player.length ? (1000 * at) / player.length : 0;
  $("clock").textContent = `${at.toFixed(2)} s · ${Math.floor(at * player.fps + 0.01)}`;
}
function setPlaying(on) {
  player.playing = on;
  $("play").textContent = on ? "❚❚" : "▶";
  if (on && now() > player.length - 1.5 / player.fps) seek(0);
  player.videos.forEach((v) => (on ? v.play().catch(() => {}) : v.pause()));
  if (on) requestAnimationFrame(follow);
}
function follow() {
  if (!player.playing) return;
  const at = now();
  // A clip that lags by more than two frames jumps to the others; players drift apart otherwise.
  for (const v of player.videos)
    if (!v.ended && Math.abs(v.currentTime - at) > 2.5 / player.fps && v.duration > at) v.currentTime = at;
  if (player.videos.every((v) => v.ended || v.currentTime >= v.duration - 1e-3)) { setPlaying(false); return; }
  showClock(at);
  requestAnimationFrame(follow);
}
function drawClips() {
  setPlaying(false);
  const set = D.clips[player.set];
  $("clip-prompt").textContent = set.prompt;
  player.length = Math.max(...set.items.map((item) => item.seconds));
  player.fps = set.fps;
  const figures = set.items.map((item) => {
    const source = `data:video/mp4;base64,${item.mp4}`;
    const video = el("video", { src: source, muted: "", playsinline: "", preload: "auto" });
    video.muted = true;
    return el("figure", {}, video, el("figcaption", {}, swatch(item.variant), D.variants[item.variant].label), el("div", { class: "score" }, item.score));
  });
  $("clip-grid").replaceChildren(...figures);
  player.videos = [...$("clip-grid").querySelectorAll("video")];
  player.videos.forEach((v) => { v.playbackRate = player.rate; v.addEventListener("loadeddata", () => { v.currentTime = Math.min(0.5 / player.fps, v.duration || 0); }, { once: true }); });
  showClock(0);
}

/* ---- memory and attention ---- */
const seen = (part) => [...new Set(part.flatMap((c) => Object.keys(c)))].filter((r) => r !== "chunk");
const FIRST = ["sink", "memory", "recent", "current"];
/** Regions in the order in which they are stacked: those that policies add stand between memory and recent. */
const REGIONS = (() => {
  const all = new Set(D.pictures.flatMap((p) => [...seen(p.regions), ...seen(p.attention_mass)]));
  const others = [...all].filter((r) => !FIRST.includes(r)).sort();
  return [...FIRST.slice(0, 2), ...others, ...FIRST.slice(2)];
})();
const OTHER = ["#c2367b", "#b58900", "#17a2b8", "#7a6a58", "#5b8c2a"];
const regionColor = (name) => (FIRST.includes(name) ? `var(--${name})` : OTHER[(REGIONS.indexOf(name) - 2) % OTHER.length]);
const legend = (id, names) => $(id).append(...names.map((name) => el("span", {}, el("i", { class: "swatch", style: `background:${regionColor(name)}` }), name)));
const figureOf = (index, node, more = 0) => el("figure", {}, el("figcaption", {}, swatch(index), D.variants[index].label + (more ? ` and ${more} more that held the same` : "")), node);
function drawMemory() {
  legend("memory-legend", REGIONS.filter((r) => D.pictures.some((p) => p.regions.some((c) => c[r]?.length))));
  const alike = new Map();
  for (const picture of D.pictures) {
    const key = JSON.stringify(picture.regions.map((c) => REGIONS.map((r) => c[r] || [])));
    alike.set(key, [...(alike.get(key) || []), picture]);
  }
  for (const [picture, ...others] of alike.values()) {
    if (!picture.regions.length) continue;
    const chunks = picture.regions;
    const top = Math.max(...chunks.flatMap((c) => REGIONS.flatMap((r) => c[r] || []))) + 1;
    const [wide, tall, left, bottom] = [250, 190, 30, 24];
    const [w, h] = [(wide - left) / chunks.length, (tall - bottom - 4) / top];
    const root = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": "frames in memory by chunk" });
    root.append(svg("rect", { x: left, y: 4, width: wide - left, height: tall - bottom - 4, fill: "var(--ground)" }));
    chunks.forEach((chunk, k) => {
      for (const region of REGIONS)
        for (const f of chunk[region] || [])
          root.append(svg("rect", { x: left + k * w, y: tall - bottom - (f + 1) * h, width: Math.max(w * 0.94, 0.7), height: Math.max(h * 0.94, 0.7), fill: regionColor(region) }));
    });
    root.append(svg("text", { x: left - 5, y: 13, "text-anchor": "end" }, top - 1), svg("text", { x: left - 5, y: tall - bottom, "text-anchor": "end" }, 0));
    root.append(svg("text", { x: wide, y: tall - 6, "text-anchor": "end" }, `chunk ${chunks[chunks.length - 1].chunk ?? chunks.length - 1}`));
    root.append(svg("text", { x: left, y: tall - 6 }, `chunk ${chunks[0].chunk ?? 0}`));
    $("memory-plots").append(figureOf(picture.variant, root, others.length));
  }
}
function drawMass() {
  legend("mass-legend", REGIONS.filter((r) => D.pictures.some((p) => p.attention_mass.some((c) => c[r]))));
  for (const picture of D.pictures) {
    const rows = picture.attention_mass;
    if (!rows.length) continue;
    const [wide, tall, left, bottom] = [250, 150, 30, 22];
    const root = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": "attention mass by region" });
    const x = (k) => left + (rows.length > 1 ? (k / (rows.length - 1)) * (wide - left) : 0);
    const y = (v) => tall - bottom - v * (tall - bottom - 6);
    let base = rows.map(() => 0);
    for (const region of REGIONS) {
      const next = rows.map((row, k) => base[k] + (row[region] || 0));
      const path = [...next.map((v, k) => `${x(k)},${y(v)}`), ...base.map((v, k) => `${x(k)},${y(v)}`).reverse()];
      const mean = rows.reduce((sum, row) => sum + (row[region] || 0), 0) / rows.length;
      root.append(tip(svg("polygon", { points: path.join(" "), fill: regionColor(region) }), `${region}: ${(100 * mean).toFixed(0)} % on the mean`));
      base = next;
    }
    for (const v of [0, 0.5, 1]) root.append(svg("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}%`));
    root.append(svg("text", { x: left, y: tall - 5 }, "chunk 0"), svg("text", { x: wide, y: tall - 5, "text-anchor": "end" }, `chunk ${rows.length - 1}`));
    $("mass-plots").append(figureOf(picture.variant, root));
  }
}

/* ---- claims, failures, card ---- */
function drawOrderings() {
  const head = el("tr", {}, ...["Claim", "Source", "Checked as", "low", "high", "difference", "pairs", "Here"].map((t, k) => el("th", { class: k < 3 ? "left" : "", style: "cursor:default" }, t)));
  const body = el("tbody");
  for (const o of D.orderings) {
    const range = o.interval ? ` [${trim(o.interval[0])}, ${trim(o.interval[1])}]` : "";
    const cells = [o.claim, o.source, o.clause].map((t) => el("td", { class: "left" }, t));
    cells.push(...[trimOr(o.low), trimOr(o.high), trimOr(o.difference) + range, o.pairs].map((t) => el("td", {}, String(t))));
    cells.push(el("td", {}, el("span", { class: `verdict ${o.verdict.split(" ")[0]}` }, o.verdict)));
    body.append(el("tr", {}, ...cells));
  }
  $("ordering-table").append(el("thead", {}, head), body);
}
const trimOr = (value) => (value === null ? "–" : trim(value));
function drawFailures() {
  for (const f of D.failures)
    $("failure-list").append(el("details", {}, el("summary", {}, `${f.label} · “${f.prompt}” · seed ${f.seed}: ${f.error}`), el("pre", {}, f.traceback || "no traceback")));
}
function drawCard() {
  const list = el("dl");
  for (const [name, text] of D.card) list.append(el("dt", {}, name), el("dd", {}, text));
  $("card-body").append(list, el("details", {}, el("summary", {}, "Effective settings of every variant"),
    ...D.variants.map((v) => el("div", {}, el("b", {}, v.label), el("pre", {}, JSON.stringify(v.settings, null, 1))))));
  $("card-body").append(el("details", {}, el("summary", {}, "What each figure is"), el("dl", {}, ...present.flatMap((name) => [el("dt", {}, title(name)), el("dd", {}, metric(name).text)]))));
  $("footer").textContent = D.footer;
}
