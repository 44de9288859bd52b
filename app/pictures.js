// Pictures of the state: plots, the film of the past, the frames in memory. Knows nothing of the socket.

const TONES = {
  sink: "#f2a65a", memory: "#b794f6", recent: "#6cb6ff", current: "#7ddc9b", scratch: "#5b6779",
  denoise: "#6cb6ff", decode: "#7ddc9b", context: "#b794f6", change: "#f2a65a",
  shown: "#7ddc9b", made: "#6cb6ff", drift: "#f2a65a", "drift B": "#6cb6ff",
};
const ORDER = ["sink", "memory", "recent"];
const POINTS = 120;
const FEWEST = 30; // points over which a short plot is stretched
const THUMB = 60;
const FILM = 120;
const LATENTS = 400;

export function bytes(size) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (size >= scale) return `${(size / scale).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(size)} B`;
}

export class Plot {
  // Lines or stacked areas over the newest chunks.
  constructor(canvas, legend, { stacked = false, format = (value) => value.toFixed(1) } = {}) {
    Object.assign(this, { canvas, legend, stacked, format, rows: [] });
  }

  clear() {
    this.rows = [];
  }

  add(values) {
    this.rows.push(values);
    if (this.rows.length > POINTS) this.rows.shift();
    this.paint();
  }

  paint() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    const names = [...new Set(this.rows.flatMap((row) => Object.keys(row)))];
    const total = (row) => names.reduce((sum, name) => sum + (row[name] || 0), 0);
    const most = Math.max(1e-9, ...this.rows.map((row) => (this.stacked ? total(row) : Math.max(0, ...Object.values(row)))));
    const x = (i) => ((width - 2) * i) / Math.max(FEWEST, this.rows.length - 1);
    const y = (value) => height - 3 - (height - 8) * (value / (most * 1.1));
    ctx.strokeStyle = "#232b38";
    for (const part of [0, 0.5, 1]) {
      ctx.beginPath();
      ctx.moveTo(0, y(most * part));
      ctx.lineTo(width, y(most * part));
      ctx.stroke();
    }
    const base = this.rows.map(() => 0);
    for (const name of names) {
      const tops = this.rows.map((row, i) => (this.stacked ? base[i] : 0) + (row[name] || 0));
      ctx.beginPath();
      tops.forEach((value, i) => (i ? ctx.lineTo(x(i), y(value)) : ctx.moveTo(x(i), y(value))));
      ctx.strokeStyle = TONES[name] || "#9aa7b8";
      ctx.lineWidth = 1.6;
      ctx.stroke();
      if (this.stacked) {
        for (let i = tops.length - 1; i >= 0; i--) ctx.lineTo(x(i), y(base[i]));
        ctx.globalAlpha = 0.45;
        ctx.fillStyle = ctx.strokeStyle;
        ctx.fill();
        ctx.globalAlpha = 1;
        tops.forEach((value, i) => (base[i] = value));
      }
    }
    const newest = this.rows[this.rows.length - 1] || {};
    this.legend.replaceChildren(...names.filter((name) => newest[name] > 0.005 * total(newest)).map((name) => {
      const item = document.createElement("i");
      item.style.setProperty("--tone", TONES[name] || "#9aa7b8");
      item.textContent = `${name} ${this.format(newest[name])}`;
      return item;
    }));
  }
}

function thumb(source, height) {
  const canvas = document.createElement("canvas");
  canvas.height = height;
  canvas.width = Math.round((height * source.width) / source.height);
  canvas.getContext("2d").drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function labelled(canvas, text) {
  const figure = document.createElement("figure");
  figure.append(canvas, text);
  return figure;
}

export class Film {
  constructor(box) {
    this.box = box;
  }

  clear() {
    this.box.replaceChildren();
  }

  add(screen, frame) {
    const figure = labelled(thumb(screen.small, THUMB), String(frame.frame));
    figure.title = frame.header.prompt;
    if (frame.header.transition) figure.className = "change";
    this.box.append(figure);
    while (this.box.children.length > FILM) this.box.firstChild.remove();
    this.box.scrollLeft = this.box.scrollWidth;
  }
}

export class MemoryPicture {
  // The latent frames each region holds tokens of, as pictures of the frames they were.
  constructor(box, line) {
    Object.assign(this, { box, line, thumbs: new Map() });
  }

  clear() {
    this.thumbs.clear();
    this.box.replaceChildren();
    this.line.textContent = "";
  }

  saw(screen, frame) {
    const { header } = frame;
    const each = header.count / header.num_latents;
    const latent = header.start_latent + Math.min(header.num_latents - 1, Math.floor(frame.index / each));
    if (this.thumbs.has(latent)) return;
    this.thumbs.set(latent, thumb(screen.small, 34));
    if (this.thumbs.size > LATENTS) {
      const [first] = [...this.thumbs.keys()].filter((key) => !this.held?.has(key));
      this.thumbs.delete(first);
    }
  }

  show(header) {
    this.held = new Set(Object.values(header.held).flat());
    const several = header.groups.length > 1; // groups of heads that hold different frames
    this.box.replaceChildren(...header.groups.flatMap(({ heads, held }, number) => {
      const title = document.createElement("small");
      title.textContent = `group ${number}: ${heads} heads of all layers`;
      const rows = Object.keys(held).sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b)).map((name) => this.row(name, held[name]));
      return several ? [title, ...rows] : rows;
    }));
    const { stored, dense, total, frames, scratch } = header.memory;
    const packed = stored && dense && stored < 0.95 * dense ? `, ${(dense / stored).toFixed(1)}x smaller than plain` : "";
    this.line.textContent = `${frames} latent frames, ${bytes(stored)} stored${packed}, ${bytes(scratch)} scratch, ` +
      `${bytes(total)} in all; the whole stream ${bytes(header.bytes)}`;
  }

  row(name, latents) {
    const row = document.createElement("div");
    const title = row.appendChild(document.createElement("b"));
    title.textContent = name;
    title.style.color = TONES[name] || "#9aa7b8";
    row.style.setProperty("--tone", TONES[name] || "#9aa7b8");
    for (const latent of latents) {
      const seen = this.thumbs.get(latent);
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = seen ? [seen.width, seen.height] : [34, 34];
      if (seen) canvas.getContext("2d").drawImage(seen, 0, 0);
      row.append(labelled(canvas, String(latent)));
    }
    return row;
  }
}

export function snapshotFigure(screen, message, choose) {
  const figure = labelled(thumb(screen.small, THUMB), `frame ${message.frame}`);
  figure.title = `return to frame ${message.frame} (${bytes(message.bytes)})`;
  figure.setAttribute("role", "button");
  figure.tabIndex = 0;
  figure.onclick = choose;
  figure.onkeydown = (event) => event.key === "Enter" && choose();
  return figure;
}
