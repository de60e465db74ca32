// One answer: asking for it, what comes, and how it looks.

import { forget, stream } from "./api.js";
import { copyButton, h, number } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { Probabilities, ProbabilityView } from "./probabilities.js";
import { Trace } from "./trace.js";

const REFRESH = 60; // milliseconds between two renderings of a text that grows
const SHARE = 8; // times what a rendering took, which are waited before the next: it never takes the most of the time
const PAUSES = [500, 2000, 8000]; // milliseconds before each time that a stream which broke off is asked for again

/** Asks, and fills `answer`, which waits for it, as it comes: content, reasoning, trace, figures, error. `changed` is called
 * each time. body: null: the server has been asked before, and keeps the answer as `answer.kept`. */
export async function run(answer, body, signal, changed) {
  const asked = body && { ...body, stream: true, stream_options: { include_usage: true } };
  if (asked && !answer.drafts) asked.speculative = "off";
  if (asked && answer.trace) asked.speculative_trace = true;
  if (asked?.logprobs) answer.probabilities = new Probabilities();
  const kept = { ...answer.kept, seen: 0 };
  const clock = { asked: performance.now(), first: 0, last: 0 };
  const taken = (event) => {
    take(answer, event, clock);
    changed();
  };
  let lost = false;
  try {
    await whole(asked, kept, taken, signal);
  } catch (error) {
    ({ lost } = error);
    if (error.name === "AbortError") {
      answer.finish = "stopped";
      forget(kept);
    } else answer.error = error.message;
  }
  answer.running = false;
  if (!lost) delete answer.kept; // else the server may still go on with it, and the page asks when it is opened again
  changed();
}

/** A stream that the server goes on with when the connection breaks off: it is asked for again, from there on. */
async function whole(asked, kept, take, signal) {
  let broken = null;
  for (let pauses = PAUSES; ; pauses = pauses.slice(1)) {
    const { seen } = kept;
    try {
      if (asked && !broken) return await stream("/v1/chat/completions", asked, take, signal, kept);
      return await stream(`/ui/answers/${kept.id}?after=${seen}`, undefined, take, signal, kept);
    } catch (error) {
      if (!error.lost) throw error.gone && broken ? Object.assign(broken, { lost: false }) : error;
      broken = error;
    }
    if (kept.seen > seen) pauses = PAUSES;
    if (!pauses.length) throw broken;
    await pause(pauses[0], signal);
  }
}

const pause = (time, signal) => new Promise((resolve) => {
  setTimeout(resolve, time);
  signal.addEventListener("abort", resolve, { once: true });
});

/** Has an answer of before wait for what the server keeps of it. Returns what puts it back where less came than there was. */
export function resumed(answer) {
  const before = { ...answer };
  const size = ({ content, reasoning }) => content.length + reasoning.length;
  Object.assign(answer, newAnswer(answer.drafts, true), answer.begun, { finish: undefined, error: undefined });
  return () => {
    if (!answer.error || size(answer) > size(before)) return;
    Object.assign(answer, { error: undefined, ...before, kept: answer.kept, running: false, trace: null });
  };
}

function take(answer, event, clock) {
  if (event.usage) count(answer, event.usage);
  const [choice] = event.choices;
  if (!choice) return;
  const { delta, finish_reason: finish, speculative_trace: steps, logprobs } = choice;
  if (delta.content || delta.reasoning_content || steps) {
    clock.last = performance.now();
    clock.first ||= clock.last;
    answer.seconds = (clock.last - clock.first) / 1000;
    answer.firstSeconds = (clock.first - clock.asked) / 1000;
  }
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  answer.probabilities?.add(logprobs?.content ?? []);
  if (steps && answer.trace) {
    answer.trace.add(steps);
    answer.perStep = answer.trace.perStep;
    answer.steps = answer.trace.forwards;
  }
  if (finish) answer.finish = finish;
}

function count(answer, usage) {
  answer.tokens = usage.completion_tokens;
  answer.promptTokens = usage.prompt_tokens;
  answer.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const accepted = usage.completion_tokens_details?.accepted_prediction_tokens;
  if (answer.trace || accepted == null || answer.tokens - 1 <= accepted) return;
  answer.steps = answer.tokens - 1 - accepted; // the first token is the prompt's
  answer.perStep = (answer.tokens - 1) / answer.steps;
}

/** An answer that is waited for: `running` until it is there, or will not come. */
export function newAnswer(drafts, traced) {
  return { content: "", reasoning: "", drafts, trace: traced ? new Trace(drafts) : null, tokens: null, seconds: 0, running: true };
}

const TELLING = 16; // tokens, of which fewer say nothing of the speed

/** Tokens per second after the first one, as they arrived here; null as long as that says nothing. */
export function rateOf(answer) {
  const tokens = answer.trace?.steps?.length ? answer.trace.tokens : (answer.tokens ?? 1) - 1;
  return tokens >= TELLING && answer.seconds > 0 ? tokens / answer.seconds : null;
}

const ENDS = { stopped: "stopped", length: "cut off at the maximum of tokens", abort: "ended by the server" };

/** Figures of an answer in words. */
export function figures(answer) {
  const rate = rateOf(answer);
  const cached = answer.cachedTokens ? ` (${number(answer.cachedTokens)} cached)` : "";
  return [
    answer.tokens && `${number(answer.tokens)} tokens`,
    rate && `${number(rate)} tokens/s`,
    answer.perStep && answer.drafts && `${number(answer.perStep, 2)} per step`,
    answer.promptTokens && `prompt ${number(answer.promptTokens)}${cached}`,
    answer.firstSeconds != null && `first token after ${number(answer.firstSeconds, 2)} s`,
    ENDS[answer.finish],
  ].filter(Boolean).join(" · ");
}

/** An answer on the page, which follows what comes. */
export class AnswerView {
  constructor(answer, head, buttons) {
    this.answer = answer;
    this.head = head ? h("p", { class: "answer-head" }, head) : null;
    this.text = h("div", { class: "text prose" });
    this.said = new MarkdownView(this.text);
    this.thought = h("details", { class: "thought", hidden: true }, h("summary", {}, "Reasoning"), h("div", { class: "prose" }));
    this.reasoned = new MarkdownView(this.thought.lastChild);
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.numbers = h("span", { class: "figures" });
    this.odds = h("button", { type: "button", class: "quiet", "aria-pressed": "false", hidden: true, onclick: () => this.toggleOdds() }, "Probabilities");
    this.foot = h("div", { class: "answer-foot" }, this.numbers, copyButton(() => answer.content), this.odds, buttons);
    this.element = h("article", { class: "message assistant", "aria-label": "Answer" },
      this.head, this.thought, this.text, this.error, this.foot);
    this.waiting = null;
    this.pause = REFRESH;
    this.draw();
  }

  /** Draws soon, so that a fast answer does not draw for each token, and a long one does nothing else. */
  update(after) {
    this.waiting ??= setTimeout(() => {
      this.waiting = null;
      const begin = performance.now();
      this.draw();
      after?.();
      this.pause = Math.max(REFRESH, SHARE * (performance.now() - begin));
    }, this.answer.running ? this.pause : 0);
  }

  draw() {
    const { answer } = this;
    this.said.show(answer.content);
    this.text.classList.toggle("waiting", Boolean(answer.running));
    this.thought.hidden = !answer.reasoning;
    this.reasoned.show(answer.reasoning);
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    this.numbers.textContent = figures(answer);
    this.odds.hidden = !answer.probabilities?.tokens.length;
    this.foot.hidden = Boolean(answer.running);
  }

  /** Shows the tokens with their probabilities instead of the text, or the text again. */
  toggleOdds() {
    if (this.odds.hidden) return;
    const shows = this.odds.getAttribute("aria-pressed") !== "true";
    this.odds.setAttribute("aria-pressed", shows);
    this.view ??= new ProbabilityView(this.answer.probabilities);
    if (shows) this.text.after(this.view.element);
    else this.view.element.remove();
    this.text.hidden = shows;
  }
}
