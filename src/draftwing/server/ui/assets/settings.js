// The panel of settings: the system prompt of a conversation, and how answers are sampled.

import { byId, h } from "./dom.js";
import { EFFORTS, NAMES, NUMBERS, PRESETS, read, requestFields, standard } from "./sampling.js";

export class Settings {
  constructor(store, facts) {
    this.store = store;
    this.inputs = new Map(); // by name of the setting
    this.system = h("textarea", { id: "system", rows: 2, placeholder: "You are a helpful assistant." });
    this.system.addEventListener("input", () => {
      Object.assign(this.conversation, { system: this.system.value, changed: Date.now() });
      store.save(this.conversation);
    });
    byId("settings").append(
      h("div", { class: "full" }, h("label", { for: "system" }, "System prompt of this conversation"), this.system),
      this.presets(),
      ...NUMBERS.map((number) => this.field(number.name, number.words,
        h("input", { inputmode: "decimal", autocomplete: "off", placeholder: standard(number, facts.sampling_defaults) }))),
      facts.knows_effort ? this.field("reasoning_effort", "Reasoning effort",
        h("select", {}, h("option", { value: "" }, "the model's own"), EFFORTS.map((one) => h("option", {}, one)))) : "",
      this.checkbox("logprobs", "Token probabilities"), this.further());
  }

  presets() {
    const button = (words, values) => h("button", { type: "button", onclick: () => this.preset(values) }, words);
    const reset = h("button", { type: "button", class: "quiet", onclick: () => this.reset() }, "Reset to the server's defaults");
    return h("div", { class: "full sampling", role: "group", "aria-label": "Presets of sampling" },
      h("span", { class: "note" }, "Sampling"), Object.entries(PRESETS).map(([words, values]) => button(words, values)), reset);
  }

  /** What few people need, folded away as long as it is empty. */
  further() {
    const text = (attributes) => h("textarea", { rows: 3, spellcheck: "false", class: "mono", ...attributes });
    const open = ["stop", "schema", "extra"].some((name) => this.store.settings[name]);
    return h("details", { class: "full further", open }, h("summary", {}, "Stop strings, JSON schema, other fields"),
      this.field("stop", "Stop strings, one a line (\\n is a line break)", text({ rows: 2 })),
      this.field("schema", "JSON schema of the answer", text({ placeholder: '{"type": "object", "properties": {...}}' })),
      this.field("extra", "Request fields as JSON", text({ placeholder: '{"logit_bias": {"42": -100}, "ignore_eos": true}' })));
  }

  /** A control with its label and a place for what is wrong with its value. */
  field(name, words, input) {
    input.id = `set-${name}`;
    const problem = h("p", { id: `wrong-${name}`, class: "error", role: "alert", hidden: true });
    input.setAttribute("aria-describedby", problem.id);
    input.value = this.store.settings[name] ?? "";
    input.addEventListener("input", () => this.changed(name, input.value));
    this.inputs.set(name, { input, problem });
    this.check(name);
    return h("div", { class: "field" }, h("label", { for: input.id }, words), input, problem);
  }

  checkbox(name, words) {
    const input = h("input", { id: `set-${name}`, type: "checkbox", checked: Boolean(this.store.settings[name]) });
    input.addEventListener("change", () => this.changed(name, input.checked ? "on" : ""));
    this.inputs.set(name, { input });
    return h("div", { class: "field toggle" }, input, h("label", { for: input.id }, words));
  }

  open(conversation) {
    this.conversation = conversation;
    this.system.value = conversation.system;
  }

  changed(name, typed) {
    if (typed.trim()) this.store.settings[name] = typed;
    else delete this.store.settings[name];
    this.store.saveSettings();
    this.check(name);
  }

  /** Marks a value that cannot be sent, and says why; whether there is none. */
  check(name) {
    const { input, problem } = this.inputs.get(name) ?? {};
    if (!problem) return true;
    const words = read(name, this.store.settings[name]).problem ?? "";
    if (words) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    problem.textContent = words;
    problem.hidden = !words;
    return !words;
  }

  /** Whether all settings can be sent; if not, shows the first that cannot. */
  valid() {
    const wrong = NAMES.find((name) => !this.check(name));
    if (wrong === undefined) return true;
    if (byId("settings").hidden) byId("settings-toggle").click();
    const { input } = this.inputs.get(wrong);
    input.closest("details")?.setAttribute("open", "");
    input.focus();
    return false;
  }

  preset(values) {
    for (const { name } of NUMBERS.filter(({ name }) => name !== "max_tokens" && name !== "seed")) this.put(name, values[name] ?? "");
  }

  reset() {
    for (const name of NAMES) this.put(name, "");
  }

  put(name, value) {
    const { input } = this.inputs.get(name) ?? {};
    if (input?.type === "checkbox") input.checked = Boolean(value);
    else if (input) input.value = value;
    this.changed(name, value);
  }

  /** Fields of a request. */
  get sampling() {
    return requestFields(this.store.settings, [...this.inputs.keys()]);
  }
}
