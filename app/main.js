// The page: the socket, and every control wired to one message. Frames are drawn by the stage.

import { Stage, unpack } from "/asset/stage.js";
import { Settings, describe, infoText } from "/asset/panels.js";
import { Film, MemoryPicture, Plot, bytes, snapshotFigure } from "/asset/pictures.js";

const EXAMPLES = [
  "a big red ball sliding from side to side on a navy background",
  "a big yellow star spinning on a plum background",
  "a big cyan square rising and falling on a black background",
  "a small green triangle orbiting on a grey background",
  "a big white ring pulsing on a teal background",
];
const at = (id) => document.getElementById(id);
const page = { model: null, token: null, running: null, started: 0, latency: null, asked: null, drift: {} };
let socket;

const stage = new Stage(at("screens"), {
  shown: (epoch, lane, frames) => send({ type: "shown", epoch, lane, frames }),
  drew,
});
const film = new Film(at("film"));
const memory = new MemoryPicture(at("memory"), at("memory-line"));
const plots = {
  fps: new Plot(at("plot-fps"), at("legend-fps")),
  ms: new Plot(at("plot-ms"), at("legend-ms"), { stacked: true, format: (value) => value.toFixed(0) }),
  kv: new Plot(at("plot-kv"), at("legend-kv"), { stacked: true, format: bytes }),
  drift: new Plot(at("plot-drift"), at("legend-drift")),
};
const settings = new Settings(at("settings"), () => {
  const { memory, codec } = settings.values();
  send({ type: "cost", memory, codec });
});
// For tests and for the console: the stage, and what has been measured.
window.streamvid = { stage, page };

// ---- messages ------------------------------------------------------------------------------------------------------

function send(message) {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.binaryType = "arraybuffer";
  let order = Promise.resolve(); // messages are taken in order, though some are decoded asynchronously
  socket.onmessage = ({ data }) => {
    order = order.then(() => take(data)).catch((error) => toast(String(error)));
  };
  socket.onclose = () => {
    state("disconnected", "bad");
    page.running = null;
    setTimeout(connect, 2000);
  };
}

async function take(data) {
  if (data instanceof ArrayBuffer) return chunk(...(await unpack(data)));
  const message = JSON.parse(data);
  return TAKERS[message.type]?.(message);
}

const TAKERS = {
  loading: ({ model }) => state(`loading ${model}`),
  hello,
  started,
  idle: ({ seconds }) => {
    page.running = null;
    state("stopped");
    toast(`The stream was closed after ${Math.round(seconds / 60)} minutes without a viewer; press Play to begin again.`);
    pauseLabel();
  },
  error: ({ text }) => toast(text),
  receipt: ({ receipt }) => {
    at("receipt").textContent = `“${receipt.text}” from chunk ${receipt.chunk}, frame ${receipt.frame} (${receipt.transition})`;
    if (page.asked && page.asked.chunk === undefined) page.asked.chunk = receipt.chunk;
  },
  cost: ({ text, problem, rows }) => {
    at("cost").textContent = problem || `One stream will hold ${text}.`;
    at("cost").className = problem ? "cost bad" : "cost";
    at("cost").title = (rows || []).map((row) => row.join(": ")).join("\n");
    at("apply").disabled = at("compare").disabled = Boolean(problem);
  },
  snapshot: (message) => {
    const choose = () => send({ type: "restore", id: message.id });
    at("snapshots").append(snapshotFigure(stage.screens[0], message, choose));
    while (at("snapshots").children.length > 6) at("snapshots").firstChild.remove();
  },
  timeline: ({ settings, prompts }) => save(new Blob([JSON.stringify({ settings, prompts }, null, 2)]), "timeline.json"),
  info: ({ model, info }) => {
    at("info").textContent = infoText(info);
    at("choose").hidden = false;
    at("choose").onclick = () => {
      state(`loading ${model}`);
      send({ type: "choose", model });
    };
  },
};

function hello(message) {
  page.model = message;
  page.token = message.token;
  at("model").title = message.model;
  at("model").textContent = `${message.model.split("/").slice(-2).join("/")} · ${message.width}×${message.height} · ${message.layers} layers · ` +
    `${message.device} ${message.dtype}`;
  const kinds = Object.entries(message.choices.transitions);
  at("transition").replaceChildren(...kinds.map(([name, text]) => new Option(name, name, false, name === "cross")));
  for (const option of at("transition").options) option.title = message.choices.transitions[option.value];
  settings.build(message.choices);
  settings.changed();
  at("picker").hidden = !message.choose_models;
  at("snapshots").replaceChildren();
  at("begin").accept = message.image ? "image/*,video/*" : "video/*,.gif";
  at("begin-line").textContent = message.image
    ? "The model starts from a picture, or goes on from a clip."
    : "The model goes on from a clip; it was not trained to start from one picture.";
  const tiny = message.model === "tiny";
  at("examples").replaceChildren(...(tiny ? EXAMPLES : []).map((text) => {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: text.replace(/^a | from side to side/g, "").replace(/on a (.*) background/, "on $1"), title: text });
    button.onclick = () => {
      at("prompt").value = text;
      at("prompt-form").requestSubmit();
    };
    return button;
  }));
  const asked = new URLSearchParams(location.search);
  if (!at("prompt").value) at("prompt").value = asked.get("prompt") || EXAMPLES[0];
  if (asked.has("seed")) at("seed").value = asked.get("seed");
  if (asked.has("pace")) stage.pace = at("pace").value = asked.get("pace");
  start();
}

function started({ epoch, lanes, settings: used, playing }) {
  page.running = used;
  page.drift = {};
  const labels = lanes.map((lane, index) => `${"AB"[index]}  ${describe(lane)}`);
  stage.begin(epoch, labels, lanes[0].fps);
  stage.playing = playing;
  if (!playing) stage.step(1e9); // a paused page still shows the beginning: the one chunk that is made
  page.allowOne = !playing;
  film.clear();
  memory.clear();
  Object.values(plots).forEach((plot) => plot.clear());
  at("timeline").replaceChildren();
  pauseLabel();
  state(playing ? "live" : "paused", playing ? "live" : "");
}

function chunk(header, pictures) {
  if (header.epoch !== stage.epoch) return;
  stage.add(header, pictures);
  if (page.allowOne) {
    page.allowOne = false;
    stage.allowed = header.count;
  }
  page.drift[header.lane] = header.drift;
  if (header.lane) return;
  const { total, ...parts } = header.seconds;
  plots.fps.add({ made: stage.madeRate, ...(stage.shownRate() ? { shown: stage.shownRate() } : {}) });
  plots.ms.add(Object.fromEntries(Object.entries(parts).map(([name, value]) => [name, value * 1000])));
  plots.kv.add({ ...header.memory.regions, scratch: header.memory.scratch });
  plots.drift.add({ drift: header.drift, ...(stage.screens[1] ? { "drift B": page.drift[1] || 0 } : {}) });
  settings.running(header);
  at("save").title = `${header.kept_frames} frames are kept`;
  const first = { frame: 0, text: page.running.prompt, transition: "", status: "applied" };
  at("timeline").replaceChildren(...[first, ...header.receipts].map((receipt) => {
    const item = document.createElement("li");
    const note = document.createElement("small");
    note.textContent = ` ${receipt.transition} ${receipt.status === "applied" ? "" : receipt.status}`;
    item.append(`${receipt.frame}: ${receipt.text}`, note);
    return item;
  }));
}

function drew(frame, screen, lane) {
  if (lane) return;
  memory.saw(screen, frame);
  if (frame.index === 0) {
    glow(screen.small);
    film.add(screen, frame);
    memory.show(frame.header);
    if (page.asked?.chunk !== undefined && frame.header.index >= page.asked.chunk) {
      page.latency = performance.now() - page.asked.time;
      page.asked = null;
      at("latency").textContent = `prompt → picture ${(page.latency / 1000).toFixed(2)} s`;
    }
  }
  at("frame").textContent = frame.frame;
}

function glow(picture) {
  // A soft light beside the picture: the colours of its left and right edge, which the page stretches over the width.
  const ctx = at("glow").getContext("2d");
  const { width, height } = picture;
  ctx.drawImage(picture, 0, 0, 2, height, 0, 0, 1, 2);
  ctx.drawImage(picture, width - 2, 0, 2, height, 1, 0, 1, 2);
}

setInterval(() => {
  at("shown-fps").textContent = stage.shownRate() ? stage.shownRate().toFixed(1) : "–";
  at("made-fps").textContent = stage.madeRate ? stage.madeRate.toFixed(1) : "–";
}, 250);

// ---- controls ------------------------------------------------------------------------------------------------------

function wanted() {
  return { prompt: at("prompt").value, seed: Number(at("seed").value) || 0, ...settings.values() };
}

function start(more = {}) {
  send({ type: "start", settings: wanted(), ...more });
}

function state(text, kind = "") {
  at("state").textContent = text;
  at("state").className = `pill ${kind}`;
}

function pauseLabel() {
  at("pause").textContent = stage.playing && page.running ? "Pause" : "Play";
}

function toast(text) {
  at("toast").textContent = text;
  at("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => (at("toast").hidden = true), 8000);
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function pause(wish = stage.playing) {
  if (!page.running) return start();
  stage.playing = !wish;
  stage.allowed = 0;
  send({ type: wish ? "pause" : "play" });
  state(wish ? "paused" : "live", wish ? "" : "live");
  pauseLabel();
}

at("prompt-form").onsubmit = (event) => {
  event.preventDefault();
  const how = document.querySelector("input[name=how]:checked").value;
  if (!at("prompt").value.trim()) return toast("Type a prompt first.");
  if (how === "reset" || !page.running) return start();
  const kind = at("transition").value;
  const numbered = ["blend", "flush"].includes(kind);
  const transition = how === "cut" ? "cut" : numbered ? `${kind}:${at("number").value}` : kind;
  const frame = at("at-frame").value === "" ? null : Number(at("at-frame").value);
  if (frame === null) page.asked = { time: performance.now() };
  send({ type: "prompt", prompt: at("prompt").value, transition, frame });
};
at("transition").onchange = () => {
  at("number").hidden = !["blend", "flush"].includes(at("transition").value);
  at("receipt").textContent = page.model.choices.transitions[at("transition").value];
};
at("how").onchange = () => {
  const how = document.querySelector("input[name=how]:checked").value;
  at("transition").hidden = how !== "transition";
  at("number").hidden = how !== "transition" || !["blend", "flush"].includes(at("transition").value);
  at("receipt").textContent = { transition: "The stream follows at its next chunk.",
    cut: "A new scene at the next chunk: memory and decoder begin afresh.",
    reset: "The stream begins again at frame 0 with the prompt." }[how];
};
at("pause").onclick = () => pause();
at("step").onclick = () => {
  if (!page.running) return start();
  if (stage.playing) pause(true);
  stage.step(stage.screens[0]?.queue[0]?.header.count || stage.screens[0]?.current?.header.count || 12);
  send({ type: "step" });
};
at("reset").onclick = () => (page.running ? send({ type: "reset" }) : start());
at("seed").onchange = () => start();
at("dice").onclick = () => {
  at("seed").value = Math.floor(Math.random() * 1e6);
  start();
};
at("pace").onchange = () => (stage.pace = at("pace").value);
at("look").onchange = () => (stage.look = at("look").value);
function look() {
  at("stage").scrollIntoView({ block: "nearest" }); // what was asked for is seen there
}
at("apply").onclick = () => {
  look();
  start();
};
at("compare").onclick = () => {
  look();
  if (!page.running) return start();
  const prompt = at("prompt").value;
  send({ type: "start", settings: { ...page.running, prompt }, compare: { ...wanted(), seed: page.running.seed } });
};
at("snapshot").onclick = () => send({ type: "snapshot" });
at("timeline-save").onclick = () => send({ type: "timeline" });
at("timeline-load").onchange = async () => {
  const [file] = at("timeline-load").files;
  try {
    const { settings: used, prompts } = JSON.parse(await file.text());
    send({ type: "start", settings: used, prompts });
    at("prompt").value = used.prompt;
    at("seed").value = used.seed ?? 0;
  } catch (error) {
    toast(`${file.name} is not a timeline: ${error.message}`);
  }
  at("timeline-load").value = "";
};
at("info-form").onsubmit = (event) => {
  event.preventDefault();
  at("info").textContent = "reading …";
  send({ type: "info", model: at("path").value });
};
at("save").onclick = async () => {
  const seconds = at("span").value;
  const last = seconds ? `?last=${Math.round(seconds * stage.fps)}` : "";
  const answer = await fetch(`/tab/${page.token}/clip.mp4${last}`);
  if (!answer.ok) return toast((await answer.json()).text);
  at("receipt").textContent = `Saved ${answer.headers.get("X-Frames")} frames.`;
  return save(await answer.blob(), "streamvid.mp4");
};

async function beginWith(name, body) {
  const answer = await fetch(`/tab/${page.token}/start/${encodeURIComponent(name)}`, { method: "PUT", body });
  if (!answer.ok) return toast((await answer.json()).text);
  return start({ begin: true });
}
at("begin").onchange = () => {
  const [file] = at("begin").files;
  if (file) beginWith(file.name, file);
  at("begin").value = "";
};
at("webcam").onclick = async () => {
  try {
    const source = await navigator.mediaDevices.getUserMedia({ video: true });
    const recorder = new MediaRecorder(source, { mimeType: "video/webm" });
    recorder.ondataavailable = ({ data }) => beginWith("webcam.webm", data);
    recorder.start();
    at("begin-line").textContent = "recording four seconds …";
    setTimeout(() => {
      recorder.stop();
      source.getTracks().forEach((track) => track.stop());
      at("begin-line").textContent = "The stream goes on from your webcam.";
    }, 4000);
  } catch (error) {
    toast(`the webcam cannot be used: ${error.message}`);
  }
};
at("webcam").hidden = !(navigator.mediaDevices && window.MediaRecorder);
document.addEventListener("keydown", (event) => {
  if (event.code !== "Space" || /INPUT|SELECT|BUTTON|SUMMARY/.test(document.activeElement.tagName)) return;
  event.preventDefault();
  pause();
});

connect();
