// How probable each token of an answer was, and what else could have come.

import { h, number } from "./dom.js";
import { shown } from "./trace.js";

export class Probabilities {
  constructor() {
    this.tokens = []; // { text, logprob, others: [{ text, logprob }] }, the likeliest of the others first
  }

  /** content: entries of `logprobs.content` of a response. */
  add(content) {
    for (const { token, logprob, top_logprobs: best } of content) {
      this.tokens.push({ text: token, logprob, others: best.map((one) => ({ text: one.token, logprob: one.logprob })) });
    }
  }

  /** They are too large to keep. */
  toJSON() {
    return undefined;
  }
}

const share = (logprob) => Math.exp(Math.min(logprob, 0));
const percent = (logprob) => `${number(100 * share(logprob), share(logprob) < 0.1 ? 2 : 1)}%`;

/** Tokens to go through with the pointer or the arrow keys, and the alternatives of the one that is looked at. */
export class ProbabilityView {
  constructor(probabilities) {
    this.tokens = probabilities.tokens;
    this.spans = this.tokens.map((token, i) => h("span", { id: `odds-${serial += 1}`, role: "option", "data-at": i, "--odds": share(token.logprob),
      "aria-label": `${shown(token.text, 40)}, ${percent(token.logprob)}` }, token.text));
    this.list = h("div", { class: "odds", tabindex: "0", role: "listbox", "aria-label": "Tokens with their probabilities: arrow keys go through them" }, this.spans);
    this.about = h("div", { class: "odds-about", "aria-live": "polite" });
    this.element = h("div", {}, this.list, this.about);
    this.list.addEventListener("pointerover", ({ target }) => { if (target.dataset.at) this.look(Number(target.dataset.at)); });
    this.list.addEventListener("keydown", (event) => this.pressed(event));
    this.list.addEventListener("focus", () => this.look(this.at));
    this.at = 0;
    this.look(0);
  }

  pressed(event) {
    const last = this.tokens.length - 1;
    const to = { ArrowRight: this.at + 1, ArrowDown: this.at + 1, ArrowLeft: this.at - 1, ArrowUp: this.at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.look(Math.min(Math.max(to, 0), last));
  }

  look(at) {
    this.spans[this.at].setAttribute("aria-selected", "false");
    this.at = at;
    this.spans[at].setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", this.spans[at].id);
    const { text, logprob, others } = this.tokens[at];
    const all = others.some((one) => one.text === text) ? others : [{ text, logprob }, ...others];
    this.about.replaceChildren(h("table", {}, h("caption", {}, `Token ${at + 1} of ${this.tokens.length}`),
      h("tbody", {}, all.map((one) => h("tr", { class: one.text === text ? "taken" : null },
        h("th", { scope: "row" }, shown(one.text, 24)), h("td", {}, percent(one.logprob)),
        h("td", {}, h("i", { "--odds": share(one.logprob) })))))));
  }
}

let serial = 0; // ids of tokens differ on the whole page
