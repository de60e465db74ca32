// The messages that are shown: questions, answers, their versions, and the form that changes one.

import { AnswerView, rateOf } from "./answers.js";
import { byId, copyButton, h, number } from "./dom.js";
import { saidView } from "./question.js";

const NEAR = 160; // pixels from the end, within which what comes is followed

export class Messages {
  /** does: what the buttons of a message do, by name: again, edit, goOn, choose, watch, waits. */
  constructor(does) {
    this.does = does;
    this.list = byId("messages");
    this.views = new Map(); // of the answers that are shown
    this.verdicts = new Map(); // of the messages that are shown, and were asked side by side
    this.atEnd = true;
    this.list.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.list;
      if (clientHeight) this.atEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    });
  }

  /** Whether somebody changes a message just now. */
  get editing() {
    return Boolean(this.list.querySelector(".edit"));
  }

  /** Draws a conversation. before: what to show of one without messages. Goes to its end, unless `stay`. */
  show(conversation, before, stay = false) {
    const { list } = this;
    const { scrollTop } = list;
    this.conversation = conversation;
    this.views.clear();
    this.verdicts.clear();
    const { messages } = conversation;
    this.does.measure(messages);
    list.replaceChildren(...(messages.length ? messages.map((node, i) => this.drawn(node, i === messages.length - 1)) : [before()]));
    list.scrollTop = stay ? scrollTop : messages.length ? list.scrollHeight : 0;
    this.atEnd ||= !stay;
  }

  drawn(node, last) {
    return node.role === "user" ? this.question(node) : this.answers(node, last);
  }

  question(node) {
    const foot = h("div", { class: "message-foot" }, copyButton(() => node.content),
      this.button("Edit", () => this.edit(node, element)), this.versions(node));
    const element = h("div", { class: "message user", role: "group", "aria-label": "You", "data-node": node.id },
      saidView(node), foot);
    return element;
  }

  answers(node, last) {
    const single = node.answers.length === 1;
    const views = node.answers.map((answer) => {
      const head = single ? node.edited && "Edited" : answer.drafts ? "With drafts" : "Without drafts";
      const traced = answer.trace?.steps?.length || answer.running;
      const whole = answer === node.answers.at(-1) ? [
        this.button("Ask again", () => this.does.again(node)),
        single && answer.content && this.button("Edit", () => this.edit(node, view.element)),
        single && last && answer.content && answer.finish !== "stop" && this.button("Continue", () => this.does.goOn(node)),
        this.versions(node),
      ] : [];
      const view = new AnswerView(answer, head, [traced && this.button("Show drafts", () => this.does.watch(answer)), whole]);
      this.views.set(answer, view);
      return view;
    });
    if (single) {
      views[0].element.dataset.node = node.id;
      return views[0].element;
    }
    const verdict = h("p", { class: "verdict" }, ...verdictOf(node.answers));
    this.verdicts.set(node, verdict);
    return h("div", { class: "both", "data-node": node.id }, h("div", { class: "pair" }, views.map(({ element }) => element)), verdict);
  }

  button(words, onclick, more = {}) {
    return h("button", { type: "button", class: "quiet", onclick, ...more }, words);
  }

  /** Buttons that go to the version before and after; nothing where there is one alone. */
  versions(node) {
    const all = this.conversation.versions(node);
    if (all.length < 2) return null;
    const at = all.indexOf(node);
    const go = (by, sign, words) => this.button(sign, () => this.goTo(all[at + by], words), { "aria-label": words, disabled: !all[at + by] });
    return h("div", { class: "versions", role: "group", "aria-label": `Version ${at + 1} of ${all.length}` },
      go(-1, "‹", "Version before"), h("span", {}, `${at + 1}/${all.length}`), go(1, "›", "Version after"));
  }

  goTo(node, pressed) {
    this.does.choose(node);
    const element = this.list.querySelector(`[data-node="${CSS.escape(node.id)}"]`);
    element.scrollIntoView({ block: "nearest" });
    const [same, other] = [pressed, "Version"].map((words) => element.querySelector(`.versions [aria-label^="${words}"]:enabled`));
    (same ?? other).focus();
  }

  /** Puts a form in place of a message. What was there stays a version of its own. */
  edit(node, element) {
    if (this.does.waits()) return;
    const question = node.role === "user";
    const field = h("textarea", { "aria-label": question ? "Your question" : "The answer's text", rows: 3 });
    field.value = node.content;
    const close = () => {
      form.replaceWith(element);
      element.querySelector("button:last-of-type").focus();
    };
    const done = () => {
      const content = field.value.trim();
      if (!content || content === node.content.trim()) close();
      else if (!this.does.waits()) this.does.edit(node, content);
    };
    const form = h("form", { class: "message edit" }, field, h("div", { class: "row-end" },
      h("span", { class: "note" }, question ? "The question before stays, as another version." : "The answer before stays, as another version."),
      this.button("Cancel", close), h("button", { class: "send" }, question ? "Send" : "Save")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      done();
    });
    form.addEventListener("keydown", (event) => {
      const send = event.key === "Enter" && !event.isComposing && (question ? !event.shiftKey : event.ctrlKey || event.metaKey);
      if (event.target === field && send) done();
      else if (event.key === "Escape") close();
      else return;
      event.preventDefault();
      event.stopPropagation(); // Escape stops an answer elsewhere
    });
    element.replaceWith(form);
    field.style.height = `${Math.min(field.scrollHeight + 4, innerHeight * 0.5)}px`;
    field.focus();
    form.scrollIntoView({ block: "nearest" });
  }

  /** There is more of an answer. */
  grown(answer) {
    this.views.get(answer)?.update(() => this.follow());
  }

  /** An answer has ended, and `node` maybe has others. */
  ended(node, answer) {
    this.views.get(answer)?.draw();
    this.verdicts.get(node)?.replaceChildren(...verdictOf(node.answers));
    this.follow();
  }

  /** Keeps to the end where it was seen before; what came meanwhile is drawn. */
  follow() {
    if (this.atEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Brings an answer's error into view. */
  showError(answer) {
    this.views.get(answer)?.error.scrollIntoView({ block: "nearest" });
  }
}

/** What two answers to one question show: the same text, and how much faster one came. */
function verdictOf(answers) {
  const [first, second] = answers;
  if (answers.some((answer) => answer.running || answer.error || !answer.finish || answer.finish === "stopped")) return [];
  const forwards = first.steps && second.steps ? ` in ${number(first.steps)} forward passes instead of ${number(second.steps)}` : "";
  const faster = rateOf(first) && rateOf(second) ? rateOf(first) / rateOf(second) : null;
  const speed = `${forwards}${faster ? `, ${number(faster, 2)} times as fast` : ""}`;
  if (first.content === second.content) return [h("b", {}, "The same text"), `${speed}.`];
  return [h("b", { class: "bad" }, "The texts differ"), ". On a GPU, --enable-deterministic-inference prevents that."];
}
