// How much of the model's context a conversation takes.

import { byId, h, number } from "./dom.js";

const MUCH = 0.8; // of the context, from which on it is shown as nearly full

export class ContextGauge {
  constructor(length) {
    this.length = length;
    const modes = byId("modes");
    this.bar = h("i", {});
    this.words = h("span", {});
    this.element = h("span", { class: "context", hidden: true }, h("span", { class: "gauge", "aria-hidden": "true" }, this.bar), this.words);
    const head = h("div", { class: "composer-head" });
    byId("modes").replaceWith(head);
    head.append(modes, this.element);
  }

  /** messages: of the conversation, whose newest answer with figures counts. */
  show(messages) {
    const used = tokensOf(messages);
    this.element.hidden = used === null;
    if (used === null) return;
    const share = Math.min(used / this.length, 1);
    this.bar.style.width = `${100 * share}%`;
    this.element.toggleAttribute("data-much", share >= MUCH);
    this.words.textContent = `${number(used)} of ${number(this.length)} tokens`;
    this.element.title = `Context: prompt and answer of the newest exchange took ${number(used)} of ${number(this.length)} tokens`;
  }
}

/** Tokens of the newest answer and its prompt; null where they are not known. */
export function tokensOf(messages) {
  const counted = messages.flatMap(({ answers }) => answers ?? []).filter(({ promptTokens, tokens }) => promptTokens && tokens != null);
  const newest = counted.at(-1);
  return newest ? newest.promptTokens + newest.tokens : null;
}
