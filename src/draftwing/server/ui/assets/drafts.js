// The panel next to the conversation: the tree of a step, figures, and a time line to go back and forth.

import { byId, h, number, s } from "./dom.js";
import { chooseFile, saveFile } from "./files.js";
import { spans } from "./pictures.js";
import { acceptedOf, classOf, readTrace, sourceOf, traceFile } from "./trace.js";
import { drawTree, inWords } from "./tree.js";

const LIVE = 260; // milliseconds between two trees while an answer runs: eyes are slower than steps
const PLAY = 650;
const FEW = 20, MANY = 160; // steps that the time line has room for
const WHO = { model: "draft model", lookup: "lookup in earlier text", both: "both", other: "drafter" };

export class Drafts {
  constructor(facts) {
    this.facts = facts;
    this.trace = null;
    this.at = 0;
    this.marked = []; // tokens of the step that is shown
    this.follows = true; // shows the newest step
    this.timer = null;
    this.playing = null;
    this.build();
    this.empty();
  }

  build() {
    const button = (label, words, what) => h("button", { type: "button", "aria-label": words, title: words, onclick: what }, label);
    this.title = h("h2", {}, "Drafts");
    this.counter = h("span", { class: "note" });
    this.source = h("p", { class: "note source", hidden: true });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.save = h("button", { type: "button", class: "quiet", onclick: () => this.saved() }, "Save");
    this.save.title = "Save this trace as a file";
    this.load = h("button", { type: "button", class: "quiet", onclick: () => chooseFile(".json", (file) => this.loaded(file)) }, "Open");
    this.load.title = "Open a trace that was saved";
    this.says = h("p", { class: "says" });
    this.why = h("p", { class: "note" }, "Nothing was drafted for this answer: at the load of the moment the engine found ",
      "steps without drafts faster, or had nothing to propose. ", h("a", { href: "#engine" }, "What the policy chooses"));
    this.images = h("div", { class: "chips", hidden: true });
    this.tree = h("div", { class: "tree", tabindex: "0", "aria-label": "Tree of drafts" });
    this.numbers = h("dl", { class: "numbers" });
    this.bars = h("div", { class: "bars" });
    this.slider = h("input", { type: "range", min: 0, max: 0, "aria-label": "Step of the answer" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.place = h("output");
    this.play = button("▶", "Play the steps", () => this.toggle());
    this.tokens = h("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens of the answer, the drafted ones underlined" });
    this.steps = h("div", { class: "steps" }, this.bars, h("div", { class: "steps-row" },
      button("‹", "Step back", () => this.go(this.at - 1)), this.play,
      button("›", "Step forward", () => this.go(this.at + 1)),
      button("★", "Step with the most accepted drafts", () => this.go(best(this.trace.steps))), this.slider, this.place));
    this.nothing = h("p", { class: "nothing" });
    this.bars.addEventListener("click", (event) => {
      const box = this.bars.getBoundingClientRect();
      this.go(this.from + Math.floor(((event.clientX - box.left) / box.width) * this.wide));
    });
    this.tokens.addEventListener("click", (event) => {
      const step = event.target.dataset?.step;
      if (step !== undefined) this.go(Number(step));
    });
    this.parts = [this.says, this.why, this.images, this.tree, this.legend(), this.steps, this.numbers, this.tokens];
    byId("drafts").append(h("div", { class: "drafts-head" }, this.title, this.counter, this.save, this.load), this.source, this.problem,
      this.nothing, ...this.parts, this.explained());
  }

  legend() {
    const key = (kind, words) => h("span", {}, h("i", { class: kind }), words);
    const { algorithm } = this.facts;
    const pair = algorithm.includes("+");
    const lookup = /^(NGRAM|SUFFIX)$/.test(algorithm);
    const own = ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"].includes(algorithm);
    const who = pair ? ["model", "lookup", "both"] : lookup ? ["lookup"] : own ? ["model"] : ["other"];
    return h("div", { class: "legend" }, who.map((by) => key(`by-${by}`, WHO[by])),
      key("by-own", "the model's own token"), key("guess", "drafted, not verified"));
  }

  explained() {
    return h("details", { class: "how", open: innerWidth > 900 }, h("summary", {}, "What is this?"), h("ol", {},
      h("li", {}, "A cheap drafter guesses how the text goes on: a tree of tokens. The bolder a branch, the higher its estimated probability."),
      h("li", {}, "The model reads the whole tree in one forward pass, which takes hardly longer than for one token, and samples its own token at every node."),
      h("li", {}, "As long as its token is a branch of the tree, that branch is taken: the thick line. Then comes the model's own next token."),
      h("li", {}, "So the text is exactly what the model alone would have written. It only comes in fewer steps.")));
  }

  empty(words) {
    this.trace = null;
    const none = this.facts.algorithm === "none"
      ? "This server drafts nothing. Start it with --speculative-algorithm, NGRAM for any model."
      : "Ask something, and watch the drafts grow.";
    this.show(words ?? none);
    this.source.hidden = this.problem.hidden = true;
  }

  saved() {
    saveFile(`draftwing-trace-${new Date().toISOString().slice(0, 19).replace(/:/g, "")}.json`, traceFile(this.trace, this.facts));
  }

  /** Shows a trace of a file; says what is wrong with it if it is none. */
  async loaded(file) {
    this.problem.hidden = true;
    try {
      const trace = readTrace(await file.text());
      this.open(trace, null, false);
      this.source.textContent = `${file.name}: ${sourceOf(trace.source)}`;
      this.source.hidden = false;
    } catch (error) {
      this.problem.textContent = error.message;
      this.problem.hidden = false;
    }
  }

  show(words) {
    this.nothing.hidden = !words;
    this.nothing.textContent = words || "";
    for (const part of this.parts) part.hidden = Boolean(words);
    byId("drafts").toggleAttribute("data-empty", Boolean(words));
    this.save.hidden = Boolean(words);
    if (words) this.counter.textContent = "";
  }

  /** Shows an answer's steps. live: it is still running. pictures: of the conversation up to it. */
  open(trace, figures, live, pictures = []) {
    if (!trace) return this.empty("How this answer was drafted is not known any more: ask again to see it.");
    this.stop();
    const same = trace === this.trace;
    this.figures = figures;
    this.pictures = pictures;
    const newest = same ? this.follows : live; // what has just ended stays where it was
    this.follows = live && newest;
    if (!same) this.begin(trace);
    if (!trace.steps.length) return this.show("Waiting for the first step.");
    if (newest) this.at = trace.steps.length - 1;
    this.draw();
  }

  begin(trace) {
    this.trace = trace;
    this.tokens.replaceChildren();
    this.marked = [];
    this.spans = []; // of the tokens, by step
    this.source.hidden = this.problem.hidden = true;
    this.at = Math.max(trace.steps.findIndex((step) => step.nodes.length), 0); // the first with drafts
  }

  /** There are more steps of the answer that is shown. */
  grown(trace) {
    if (trace !== this.trace || this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (trace !== this.trace || !trace.steps.length) return;
      if (this.follows) this.at = trace.steps.length - 1;
      this.draw();
    }, LIVE);
  }

  go(at) {
    if (!this.trace?.steps.length) return;
    this.stop();
    this.follows = false;
    this.at = Math.min(Math.max(at, 0), this.trace.steps.length - 1);
    this.draw();
  }

  toggle() {
    if (this.playing) return this.stop();
    this.follows = false;
    if (this.at >= this.trace.steps.length - 1) this.at = -1;
    const next = () => {
      if (this.at >= this.trace.steps.length - 1) return this.stop();
      this.at += 1;
      this.draw();
    };
    this.playing = setInterval(next, PLAY);
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    next();
  }

  stop() {
    clearInterval(this.playing);
    this.playing = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play the steps");
  }

  draw() {
    const { steps } = this.trace;
    const step = steps[this.at];
    this.show("");
    this.counter.textContent = step.step ? `step ${step.step} of ${steps.at(-1).step}` : "after the prompt";
    const words = step.step ? inWords(step) : "The prompt gives the first token.";
    const [what, gives] = words.split(": ");
    this.says.replaceChildren(gives ? `${what}: ` : words, gives ? h("b", {}, gives) : "");
    this.tree.replaceChildren(drawTree(step, this.trace.before(this.at), this.tree.clientWidth));
    this.images.replaceChildren(...spans(step.images ?? [], step.images ? this.pictures : []));
    this.images.hidden = !step.images;
    this.slider.max = steps.length - 1;
    this.slider.value = this.at;
    this.place.textContent = `${number(step.seconds * 1000, 1)} ms`;
    this.why.hidden = !this.trace.drafts || this.trace.drafted || steps.length < 5;
    this.drawNumbers();
    this.drawBars();
    this.drawTokens();
  }

  drawNumbers() {
    const { trace, figures } = this;
    const one = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    this.numbers.replaceChildren(
      one("Tokens per step", number(trace.perStep, 2)), one("Forward passes", number(trace.forwards)),
      one("Tokens", number(trace.tokens)), one("Tokens per second", number(figures?.())));
  }

  drawBars() {
    const { steps } = this.trace;
    this.wide = Math.min(Math.max(steps.length, FEW), MANY);
    this.from = Math.max(Math.min(this.at - Math.floor(MANY * 0.75), steps.length - this.wide), 0);
    const seen = steps.slice(this.from, this.from + this.wide);
    const most = Math.max(4, ...seen.map((step) => step.tokens.length));
    const svg = s("svg", { viewBox: `0 0 ${this.wide} ${most}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(s("rect", { class: "now", x: this.at - this.from, y: 0, width: 1, height: most }));
    seen.forEach((step, at) => {
      const accepted = acceptedOf(step);
      step.tokens.forEach((_, i) => {
        const kind = i < accepted.length ? classOf(accepted[i]) : "own";
        svg.append(s("rect", { class: kind, x: at + 0.07, y: most - i - 1 + 0.06, width: 0.86, height: 0.88 }));
      });
    });
    this.bars.replaceChildren(svg);
  }

  drawTokens() {
    const { steps } = this.trace;
    for (let at = this.spans.length; at < steps.length; at += 1) {
      const accepted = acceptedOf(steps[at]);
      this.spans.push(steps[at].tokens.map((token, i) => {
        const kind = i < accepted.length ? `drafted ${classOf(accepted[i])}` : "";
        const words = token.special ? { title: "Special token, no part of the text" } : {};
        return h("span", { class: `${kind}${token.special ? " special" : ""}`, "data-step": at, ...words }, token.text);
      }));
      this.tokens.append(...this.spans[at]);
    }
    for (const span of this.marked) span.classList.remove("now");
    this.marked = this.spans[this.at];
    for (const span of this.marked) span.classList.add("now");
    this.tokens.scrollTop = this.marked[0].offsetTop - this.tokens.offsetTop - 50;
  }
}

/** The first step in which the most drafts were accepted, and of those the one with the largest tree. */
function best(steps) {
  const worth = steps.map((step) => acceptedOf(step).length * 1000 + step.nodes.length);
  return worth.indexOf(Math.max(...worth));
}
