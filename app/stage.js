// The stage: frames wait in a short buffer and are drawn at an even pace. Knows nothing of panels or of the socket.

const WINDOW = 2000; // milliseconds over which the shown rate is measured

export class Screen {
  // One picture: a canvas with its buffer of frames.
  constructor(label) {
    this.figure = document.createElement("figure");
    this.canvas = this.figure.appendChild(document.createElement("canvas"));
    this.caption = this.figure.appendChild(document.createElement("figcaption"));
    this.caption.textContent = label;
    this.caption.hidden = !label;
    this.queue = [];
    this.shown = 0;
    this.current = null;
    this.small = document.createElement("canvas");
  }

  draw(frame, look) {
    const { width, height } = frame.picture;
    const times = Math.max(1, Math.floor(256 / Math.max(width, height)));
    if (this.canvas.width !== width * times) {
      [this.canvas.width, this.canvas.height] = [width * times, height * times];
      [this.small.width, this.small.height] = [width, height];
    }
    const small = this.small.getContext("2d", { willReadFrequently: true });
    if (frame.picture instanceof ImageData) small.putImageData(frame.picture, 0, 0);
    else small.drawImage(frame.picture, 0, 0);
    const big = this.canvas.getContext("2d");
    // Crisp: whole squares in the canvas, which the page then scales smoothly to its own size.
    big.imageSmoothingEnabled = look === "smooth";
    big.imageSmoothingQuality = "high";
    big.drawImage(this.small, 0, 0, this.canvas.width, this.canvas.height);
    this.current = frame;
  }
}

export class Stage {
  // callbacks: shown(epoch, lane, frames) tells the server; drew(frame) is called for each frame of the first screen.
  constructor(box, callbacks) {
    Object.assign(this, { box, callbacks, screens: [], epoch: 0, playing: false, pace: "native", look: "smooth" });
    this.madeRate = 0;
    this.draws = 0; // pictures painted: fewer than frames shown where the browser could not keep up
    this.fps = 16;
    this.allowed = 0; // frames to show while paused
    this.due = 0;
    this.last = performance.now();
    this.times = [];
    this.pending = new Map();
    requestAnimationFrame((now) => this.tick(now));
  }

  begin(epoch, labels, fps) {
    this.epoch = epoch;
    this.fps = fps;
    this.due = 0;
    this.allowed = 0;
    this.madeRate = 0;
    this.screens = labels.map((label) => new Screen(labels.length > 1 ? label : ""));
    this.box.replaceChildren(...this.screens.map((screen) => screen.figure));
  }

  add(header, pictures) {
    const screen = this.screens[header.lane];
    if (header.epoch !== this.epoch || !screen) return;
    pictures.forEach((picture, i) => screen.queue.push({ picture, header, index: i, frame: header.start_frame + i }));
    const rate = header.count / header.period;
    // The first chunk of a stream is not like the others: it does not count for long.
    this.madeRate = this.madeRate && header.index > 1 ? 0.7 * this.madeRate + 0.3 * rate : rate;
  }

  get waiting() {
    return this.screens.length ? Math.min(...this.screens.map((screen) => screen.queue.length)) : 0;
  }

  step(frames) {
    this.allowed = Math.max(0, this.allowed) + frames;
  }

  rate() {
    // Frames a second to show: the native pace where the stream is made faster, else as it is made, corrected so that
    // the buffer neither runs dry nor fills.
    const chunk = this.screens[0]?.current?.header.count || 12;
    if (this.pace === "native" && this.madeRate > 1.1 * this.fps) return this.fps;
    const level = this.waiting / chunk;
    return this.madeRate * Math.min(1.15, Math.max(0.85, 0.85 + 0.3 * level));
  }

  tick(now) {
    const seconds = Math.min(1, (now - this.last) / 1000);
    this.last = now;
    if ((this.playing || this.allowed > 0) && this.waiting) {
      this.due += seconds * Math.max(1, this.rate());
      let count = Math.min(Math.floor(this.due), this.waiting);
      if (!this.playing) count = Math.min(count, this.allowed);
      if (count > 0) this.advance(count, now);
      this.due = Math.min(this.due, 2);
    } else this.due = Math.min(1, this.due + seconds * this.fps);
    while (this.times.length && now - this.times[0] > WINDOW) this.times.shift();
    requestAnimationFrame((next) => this.tick(next));
  }

  advance(count, now) {
    this.due -= count;
    this.allowed -= this.playing ? this.allowed : count;
    this.screens.forEach((screen, lane) => {
      const passed = screen.queue.splice(0, count);
      screen.draw(passed[passed.length - 1], this.look);
      screen.shown += count;
      for (const frame of passed) this.callbacks.drew(frame, screen, lane);
      this.tell(lane, screen, now);
    });
    this.times.push(now);
    this.draws += 1;
  }

  tell(lane, screen, now) {
    // Word to the server at most every 60 ms, and whenever the buffer runs low.
    const before = this.pending.get(lane) || 0;
    if (now - before < 60 && screen.queue.length > 2) return;
    this.pending.set(lane, now);
    this.callbacks.shown(this.epoch, lane, screen.shown);
  }

  shownRate() {
    if (this.times.length < 2) return 0;
    return ((this.times.length - 1) * 1000) / (this.times[this.times.length - 1] - this.times[0]);
  }
}

export async function unpack(buffer) {
  // A binary message as [header, pictures]: ImageData for raw frames, ImageBitmap for compressed ones.
  const view = new DataView(buffer);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  const pictures = [];
  const { width, height, count } = header;
  for (let i = 0; i < count; i++) {
    if (header.encoding === "rgb") {
      pictures.push(fromRgb(new Uint8Array(buffer, at, width * height * 3), width, height));
      at += width * height * 3;
    } else {
      const size = view.getUint32(at, true);
      pictures.push(await createImageBitmap(new Blob([new Uint8Array(buffer, at + 4, size)], { type: "image/jpeg" })));
      at += 4 + size;
    }
  }
  return [header, pictures];
}

function fromRgb(rgb, width, height) {
  const picture = new ImageData(width, height);
  const data = picture.data;
  for (let i = 0, j = 0; i < rgb.length; i += 3, j += 4) {
    data[j] = rgb[i];
    data[j + 1] = rgb[i + 1];
    data[j + 2] = rgb[i + 2];
    data[j + 3] = 255;
  }
  return picture;
}
