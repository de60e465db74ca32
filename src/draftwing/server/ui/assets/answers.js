// One answer: asking for it, what comes, and how it looks.

import { stream } from "./api.js";
import { copyButton, h, number } from "./dom.js";
import { markdown } from "./markdown.js";
import { Trace } from "./trace.js";

const REFRESH = 60; // milliseconds between two renderings of a text that grows

/** Asks, and fills `answer`, which waits for it, as it comes: content, reasoning, trace, figures, error. `changed` is called each time. */
export async function run(answer, body, signal, changed) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  if (!answer.drafts) asked.speculative = "off";
  if (answer.trace) asked.speculative_trace = true;
  const clock = { first: 0, last: 0 };
  try {
    await stream("/v1/chat/completions", asked, (event) => {
      take(answer, event, clock);
      changed();
    }, signal);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message;
  }
  answer.running = false;
  changed();
}

function take(answer, event, clock) {
  if (event.usage) answer.tokens = event.usage.completion_tokens;
  const [choice] = event.choices;
  if (!choice) return;
  const { delta, finish_reason: finish, speculative_trace: steps } = choice;
  if (delta.content || delta.reasoning_content || steps) {
    clock.last = performance.now();
    clock.first ||= clock.last;
    answer.seconds = (clock.last - clock.first) / 1000;
  }
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  if (steps && answer.trace) {
    answer.trace.add(steps);
    answer.perStep = answer.trace.perStep;
    answer.steps = answer.trace.decoding.length;
  }
  if (finish) answer.finish = finish;
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

/** Figures of an answer in words. */
export function figures(answer) {
  const rate = rateOf(answer);
  const parts = [];
  if (answer.tokens) parts.push(`${number(answer.tokens)} tokens`);
  if (answer.perStep && answer.drafts) parts.push(`${number(answer.perStep, 2)} per step`);
  if (rate) parts.push(`${number(rate)} tokens/s`);
  if (answer.finish === "stopped") parts.push("stopped");
  if (answer.finish === "length") parts.push("cut off: the most tokens were reached");
  if (answer.finish === "abort") parts.push("ended by the server");
  return parts.join(" · ");
}

/** An answer on the page, which follows what comes. */
export class AnswerView {
  constructor(answer, head, buttons) {
    this.answer = answer;
    this.head = head ? h("p", { class: "answer-head" }, head) : null;
    this.text = h("div", { class: "text" });
    this.thought = h("details", { class: "thought", hidden: true }, h("summary", {}, "Reasoning"), h("div", {}));
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.numbers = h("span", { class: "figures" });
    this.foot = h("div", { class: "answer-foot" }, this.numbers, copyButton(() => answer.content), buttons);
    this.element = h("article", { class: "message assistant", "aria-label": "Answer" },
      this.head, this.thought, this.text, this.error, this.foot);
    this.waiting = null;
    this.draw();
  }

  /** Draws soon, so that a fast answer does not draw for each token. */
  update(after) {
    this.waiting ??= setTimeout(() => {
      this.waiting = null;
      this.draw();
      after?.();
    }, this.answer.running ? REFRESH : 0);
  }

  draw() {
    const { answer } = this;
    this.text.replaceChildren(...markdown(answer.content));
    this.text.classList.toggle("waiting", Boolean(answer.running));
    this.thought.hidden = !answer.reasoning;
    this.thought.lastChild.textContent = answer.reasoning;
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    this.numbers.textContent = figures(answer);
    this.foot.hidden = Boolean(answer.running);
  }
}
