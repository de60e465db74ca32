// The conversation: questions, answers, and the list of conversations beside them.

import { AnswerView, figures, newAnswer, rateOf, run } from "./answers.js";
import { Attachments } from "./attachments.js";
import { ContextGauge } from "./context.js";
import { byId, h, number, speak } from "./dom.js";
import { saidView } from "./question.js";
import { Settings } from "./settings.js";

const EXAMPLES = [
  "List 3 countries and their capitals.",
  "Why is the sky blue?",
  "Write a Python function that merges two sorted lists.",
  "Repeat this three times: the quick brown fox jumps over the lazy dog.",
];
const MODES = [["on", "Drafts on"], ["off", "Drafts off"], ["both", "Side by side"]];

export class Chat {
  constructor(facts, store, drafts) {
    this.facts = facts;
    this.store = store;
    this.drafts = drafts;
    this.settings = new Settings(store, facts);
    this.running = null; // what stops the answer that runs
    this.question = byId("question");
    this.send = byId("send");
    this.list = byId("messages");
    this.attachments = new Attachments();
    this.gauge = new ContextGauge(facts.context_length);
    this.makeModes();
    this.listen();
    this.open(store.conversations[0] ?? store.add());
    store.follow(() => this.conversation, () => this.renderList());
  }

  makeModes() {
    const drafting = this.facts.algorithm !== "none";
    const chosen = drafting ? this.store.settings.mode ?? "on" : "off";
    const fields = byId("modes");
    fields.disabled = !drafting;
    if (!drafting) fields.title = "The server was started without a drafter";
    for (const [value, words] of MODES) {
      const radio = h("input", { type: "radio", name: "mode", value, checked: value === chosen });
      radio.addEventListener("change", () => {
        this.store.settings.mode = value;
        this.store.saveSettings();
      });
      fields.append(h("label", {}, radio, words));
    }
  }

  get mode() {
    return document.querySelector("[name=mode]:checked").value;
  }

  listen() {
    const { question, send } = this;
    question.addEventListener("input", () => this.fit());
    question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    send.addEventListener("click", () => (this.running ? this.running.abort() : this.submit()));
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    byId("new").addEventListener("click", () => this.open(this.fresh()));
    const toggle = (button, panel, what) => byId(button).addEventListener("click", () => {
      const shown = byId(button).getAttribute("aria-expanded") !== "true";
      byId(button).setAttribute("aria-expanded", shown);
      what(shown, byId(panel));
    });
    toggle("settings-toggle", "settings", (shown, panel) => { panel.hidden = !shown; });
    toggle("list-toggle", "sidebar", (shown) => byId("chat").toggleAttribute("data-list", shown));
    toggle("drafts-toggle", "drafts", (shown) => byId("chat").toggleAttribute("data-no-drafts", !shown));
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight}px`;
  }

  // -- conversations --

  fresh() {
    return this.store.conversations.find((one) => !one.messages.length) ?? this.store.add();
  }

  open(conversation) {
    this.running?.abort();
    this.conversation = conversation;
    this.settings.open(conversation);
    this.drafts.empty();
    this.render();
    this.renderList();
    this.question.focus();
  }

  renderList() {
    const rows = this.store.conversations.filter((one) => one.messages.length || one === this.conversation).map((one) => {
      const open = h("button", { type: "button", class: "open", onclick: () => this.open(one) }, one.title || "New conversation");
      const remove = h("button", { type: "button", class: "remove", onclick: () => this.remove(one) }, "×");
      remove.setAttribute("aria-label", `Delete ${one.title || "the new conversation"}`);
      if (one === this.conversation) open.setAttribute("aria-current", "true");
      return h("li", { "data-open": one === this.conversation }, open, remove);
    });
    byId("conversations").replaceChildren(...rows);
    byId("title").textContent = this.conversation.title || "New conversation";
  }

  remove(one) {
    if (one.messages.length && !confirm(`Delete "${one.title}"?`)) return;
    this.store.remove(one);
    if (one === this.conversation) this.open(this.fresh());
    else this.renderList();
  }

  // -- messages --

  render() {
    const { messages } = this.conversation;
    this.list.replaceChildren(...(messages.length ? messages.map((one, i) => this.rendered(one, i)) : [this.welcome()]));
    this.gauge.show(messages);
    this.list.scrollTop = messages.length ? this.list.scrollHeight : 0;
  }

  welcome() {
    const example = (words) => h("button", { type: "button", onclick: () => { this.question.value = words; this.submit(); } }, words);
    const drafts = this.facts.algorithm === "none" ? "" : " While it answers you see which tokens are drafted, and which of them are accepted.";
    return h("div", { class: "welcome" }, h("h2", {}, `Talk to ${this.facts.model}`),
      h("p", {}, `It runs on this server alone.${drafts}`), h("div", { class: "examples" }, EXAMPLES.map(example)));
  }

  rendered(message, i) {
    if (message.role === "user") {
      const edit = h("button", { type: "button", class: "quiet", onclick: () => this.edit(i) }, "Edit");
      return h("div", { class: "message user", role: "group", "aria-label": "You" }, edit, saidView(message.content));
    }
    const last = i === this.conversation.messages.length - 1;
    message.views = message.answers.map((answer) => {
      const head = message.answers.length > 1 ? (answer.drafts ? "With drafts" : "Without drafts") : "";
      return new AnswerView(answer, head, [this.showButton(answer), last && answer === message.answers.at(-1) && this.againButton()]);
    });
    if (message.views.length === 1) return message.views[0].element;
    message.verdict = h("p", { class: "verdict" }, ...verdict(message.answers));
    return h("div", { class: "both" }, h("div", { class: "pair" }, message.views.map((view) => view.element)), message.verdict);
  }

  showButton(answer) {
    if (!answer.trace?.steps?.length && !answer.running) return null;
    return h("button", { type: "button", class: "quiet", onclick: () => this.watch(answer) }, "Show drafts");
  }

  againButton() {
    return h("button", { type: "button", class: "quiet", onclick: () => this.again() }, "Ask again");
  }

  watch(answer) {
    this.drafts.open(answer.trace, () => rateOf(answer), Boolean(answer.running));
  }

  // -- asking --

  submit() {
    if (this.running || !this.settings.valid()) return;
    const content = this.attachments.take(this.question.value.trim());
    if (!content) return;
    this.question.value = "";
    this.fit();
    const { conversation } = this;
    conversation.title ||= content.length > 46 ? `${content.slice(0, 45)}…` : content;
    conversation.messages.push({ role: "user", content });
    this.renderList();
    this.answer();
  }

  /** Takes a question back, and all that came after it. */
  edit(i) {
    if (this.running) return;
    this.question.value = this.attachments.restore(this.conversation.messages[i].content);
    this.conversation.messages.length = i;
    this.store.save();
    this.render();
    this.fit();
    this.question.focus();
  }

  again() {
    if (this.running || !this.settings.valid()) return;
    this.conversation.messages.pop();
    this.question.focus(); // the button goes, and Escape is heard here
    this.answer();
  }

  async answer() {
    const { conversation, mode } = this;
    const body = this.body();
    const traced = byId("drafts-toggle").getAttribute("aria-expanded") === "true";
    // With drafts first: what it writes must not be there to be looked up.
    const answers = (mode === "both" ? [true, false] : [mode === "on"]).map((drafts) => newAnswer(drafts, traced));
    if (answers.length > 1) body.seed ??= Math.floor(Math.random() * 2 ** 31);
    const message = { role: "assistant", answers, content: "" };
    conversation.messages.push(message);
    this.running = new AbortController();
    this.busy(true);
    this.render();
    speak("The answer begins.");
    for (const [i, answer] of answers.entries()) {
      if (this.running.signal.aborted) Object.assign(answer, { finish: "stopped", running: false });
      else await this.one(answer, message, i, body);
    }
    this.running = null;
    message.content = answers.map((answer) => answer.content).find(Boolean) ?? "";
    this.store.save();
    this.busy(false);
    if (conversation === this.conversation) {
      this.render();
      if (answers.length > 1 && answers[0].trace) this.watch(answers[0]);
    }
    speak(answers.some((answer) => answer.error) ? "There was an error." : `The answer is complete: ${figures(answers[0])}.`);
    this.question.focus();
  }

  async one(answer, message, i, body) {
    if (answer.trace) this.watch(answer);
    let begun = false;
    await run(answer, body, this.running.signal, () => {
      if (!this.list.isConnected || !message.views) return;
      message.views[i].update(() => this.follow());
      if (!answer.trace?.steps.length) return;
      if (begun) this.drafts.grown(answer.trace);
      else this.watch(answer);
      begun = true;
    });
    message.views?.[i].draw();
    if (message.verdict) message.verdict.replaceChildren(...verdict(message.answers));
    if (answer.trace && answer.trace === this.drafts.trace) this.watch(answer);
  }

  follow() {
    const { list } = this;
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 160) list.scrollTop = list.scrollHeight;
  }

  busy(is) {
    this.send.textContent = is ? "Stop" : "Send";
    this.send.toggleAttribute("data-stops", is);
  }

  body() {
    const { conversation } = this;
    const system = conversation.system.trim();
    // Templates may want turns to alternate: a question that got no answer is not asked again with the next one.
    const answered = (one, i, all) => one.content && all[i + 1]?.content !== "";
    const said = conversation.messages.filter(answered).map(({ role, content }) => ({ role, content }));
    const messages = system ? [{ role: "system", content: system }, ...said] : said;
    return { model: this.facts.model, messages, ...this.settings.sampling };
  }
}

/** What two answers to one question show: the same text, and how much faster one came. */
function verdict(answers) {
  const [first, second] = answers;
  if (answers.some((answer) => answer.running || answer.error || !answer.finish || answer.finish === "stopped")) return [];
  const forwards = first.steps && second.steps ? ` in ${number(first.steps)} forward passes instead of ${number(second.steps)}` : "";
  const faster = rateOf(first) && rateOf(second) ? rateOf(first) / rateOf(second) : null;
  const speed = `${forwards}${faster ? `, ${number(faster, 2)} times as fast` : ""}`;
  if (first.content === second.content) return [h("b", {}, "The same text"), `${speed}.`];
  return [h("b", { class: "bad" }, "The texts differ"), ". On a GPU, --enable-deterministic-inference prevents that."];
}
