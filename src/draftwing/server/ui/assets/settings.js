// What is asked beside the question: the system prompt, and how the answer is sampled.

import { byId, h } from "./dom.js";

// Field of the request, words, whole numbers or not, lowest, highest, and what holds where nothing is given.
const FIELDS = [
  ["temperature", "Temperature", 0.1, 0, 10, 1],
  ["top_p", "Top-p", 0.05, 0, 1, 1],
  ["top_k", "Top-k", 1, -1, 1e9, "off"],
  ["min_p", "Min-p", 0.05, 0, 1, 0],
  ["repetition_penalty", "Repetition penalty", 0.05, 0, 2, 1],
  ["max_tokens", "Most tokens", 1, 1, 1e9, "no limit"],
  ["seed", "Seed", 1, 0, 2 ** 53 - 1, "random"],
];

export class Settings {
  constructor(store, facts) {
    this.store = store;
    this.system = h("textarea", { id: "system", rows: 2, placeholder: "You are a helpful assistant." });
    this.system.addEventListener("input", () => {
      Object.assign(this.conversation, { system: this.system.value, changed: Date.now() });
      store.save(this.conversation);
    });
    const fields = FIELDS.map(([name, words, step, min, max, otherwise]) => {
      const shown = facts.sampling_defaults[name] ?? otherwise;
      const input = h("input", { id: `set-${name}`, type: "number", step, min, max, placeholder: shown });
      input.value = store.settings[name] ?? "";
      input.addEventListener("input", () => this.changed(name, input));
      return h("div", {}, h("label", { for: `set-${name}` }, words), input);
    });
    byId("settings").append(
      h("div", { class: "full" }, h("label", { for: "system" }, "System prompt of this conversation"), this.system), ...fields);
  }

  open(conversation) {
    this.conversation = conversation;
    this.system.value = conversation.system;
  }

  changed(name, input) {
    const value = input.valueAsNumber;
    // null: what the server does by itself.
    this.store.settings[name] = Number.isNaN(value) || !input.checkValidity() ? null : value;
    this.store.saveSettings();
  }

  /** Fields of a request. */
  get sampling() {
    const known = new Set(FIELDS.map(([name]) => name));
    return Object.fromEntries(Object.entries(this.store.settings).filter(([name, value]) => known.has(name) && value !== null));
  }
}
