// The settings form, built from what the model offers. Knows nothing of frames.

const KINDS = [["memory", "memory"], ["codec", "codec"], ["step_cache", "step cache"]];

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export class Settings {
  // changed() is called when a choice changes.
  constructor(box, changed) {
    Object.assign(this, { box, changed, kinds: {} });
  }

  build(choices) {
    this.choices = choices;
    const defaults = { memory: choices.default_memory, codec: choices.default_codec, step_cache: "none" };
    this.box.replaceChildren();
    for (const [kind, label] of KINDS) this.box.append(this.plugin(kind, label, defaults[kind]));
    this.box.append(this.attention(), this.steps());
  }

  plugin(kind, label, spec) {
    const select = element("select", { id: `set-${kind}` });
    for (const [name, { unfit }] of Object.entries(this.choices[kind])) {
      select.append(element("option", { value: name, disabled: Boolean(unfit), title: unfit || "" }, name));
    }
    select.setAttribute("aria-label", label);
    const fields = element("div", { className: "fields" });
    const about = element("p");
    const part = (this.kinds[kind] = { select, fields, inputs: {} });
    const show = (given = {}) => {
      const plugin = this.choices[kind][select.value];
      part.inputs = {};
      fields.replaceChildren(...plugin.fields.map(({ name, default: value }) => {
        const input = element("input", { value: given[name] ?? value });
        part.inputs[name] = [input, value];
        input.onchange = () => this.changed();
        return element("label", {}, name, input);
      }));
      about.textContent = plugin.about;
    };
    const [name, , rest] = spec.match(/^([^:]*)(:(.*))?$/) ? [spec.split(":")[0], ":", spec.split(":").slice(1).join(":")] : [spec];
    select.value = name;
    show(Object.fromEntries((rest || "").split(",").filter(Boolean).map((pair) => pair.split("="))));
    select.onchange = () => {
      show();
      this.changed();
    };
    const now = (part.now = element("p"));
    return element("div", { className: "setting" }, element("div", {}, element("b", {}, label), select), fields, about, now);
  }

  running({ steps, compute, seconds }) {
    // What the last chunk cost: passes run and left out, and the time of each.
    const { computed = 0, skipped = 0 } = steps;
    const each = computed ? `, ${((1000 * seconds.denoise) / computed).toFixed(0)} ms each` : "";
    this.kinds.step_cache.now.textContent = `Now: ${computed} passes run, ${skipped} left out; ` +
      `${Math.round(100 * compute)} % of the full cost so far${each}.`;
  }

  attention() {
    const select = (this.backend = element("select", { id: "set-attention" }));
    const about = element("p", {}, this.choices.attention.auto);
    for (const name of Object.keys(this.choices.attention)) select.append(element("option", { value: name }, name));
    select.onchange = () => {
      about.textContent = this.choices.attention[select.value];
      this.changed();
    };
    return element("div", { className: "setting" }, element("div", {}, element("b", {}, "attention"), select), about);
  }

  steps() {
    const input = (this.count = element("input", { type: "number", min: 1, max: 1000, id: "set-steps" }));
    input.value = this.choices.default_steps;
    const about = element("p");
    const tell = () => {
      const times = (Number(input.value) + 1) / (this.choices.default_steps + 1);
      about.textContent = `${input.value} passes a chunk and the context pass: ${times.toFixed(2)} times the model's own`;
    };
    input.onchange = () => {
      tell();
      this.changed();
    };
    tell();
    return element("div", { className: "setting" }, element("div", {}, element("b", {}, "steps"), input), about);
  }

  spec(kind) {
    const { select, inputs } = this.kinds[kind];
    const pairs = Object.entries(inputs).filter(([, [input, value]]) => input.value !== value);
    const rest = pairs.map(([name, [input]]) => `${name}=${input.value}`).join(",");
    return rest ? `${select.value}:${rest}` : select.value;
  }

  values() {
    const steps = Number(this.count.value);
    return {
      memory: this.spec("memory"),
      codec: this.spec("codec"),
      step_cache: this.spec("step_cache"),
      attention: this.backend.value,
      steps: steps === this.choices.default_steps ? null : steps,
    };
  }
}

export function describe(settings) {
  // One line on what a stream runs with, for the caption of a comparison.
  const parts = [settings.memory, settings.codec, settings.step_cache].map((part) => {
    if (typeof part === "string") return part;
    const { name, ...rest } = part;
    const shown = Object.entries(rest).filter(([, value]) => value !== null && typeof value !== "object");
    return `${name} ${shown.map(([key, value]) => `${key}=${value}`).join(" ")}`.trim();
  });
  return `${parts.filter((part) => !/^(none|NoCache)/.test(part)).join(" · ")} · ${settings.timesteps.length} steps`;
}

export function infoText(found) {
  // What `streamvid info` says, as lines.
  const lines = [`${found.path}: ${found.layout}`];
  for (const part of found.parts) {
    lines.push(`${part.part} (${part.kind}): ${part.parameters.toLocaleString()} parameters, ` +
      `${(part.num_bytes / 1e6).toFixed(1)} MB, ${Object.keys(part.dtypes).join(", ")}`);
    lines.push("  " + Object.entries(part.geometry).map(([key, value]) => `${key} ${value}`).join(", "));
  }
  for (const [frames, size] of Object.entries(found.cache_bytes)) {
    lines.push(`keys and values of ${frames} latent frames, bfloat16: ${(size / 1e6).toFixed(1)} MB`);
  }
  for (const reason of Object.values(found.missing)) lines.push(`missing: it ${reason}`);
  return lines.join("\n");
}
