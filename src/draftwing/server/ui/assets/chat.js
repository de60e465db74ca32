// The conversation that is open, what is asked in it, and the answers that are written, in this and in others.

import { figures, newAnswer, rateOf, resumed, run } from "./answers.js";
import { newKept } from "./api.js";
import { Attachments } from "./attachments.js";
import { ContextGauge } from "./context.js";
import { byId, h, speak } from "./dom.js";
import { Messages } from "./messages.js";
import { notice } from "./overlays.js";
import { contentOf, picturesOf } from "./pictures.js";
import { Presets } from "./presets.js";
import { Settings } from "./settings.js";
import { shortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";

const EXAMPLES = [
  "List 3 countries and their capitals.",
  "Why is the sky blue?",
  "Write a Python function that merges two sorted lists.",
  "Repeat this three times: the quick brown fox jumps over the lazy dog.",
];
const MODES = [["on", "Drafts on"], ["off", "Drafts off"], ["both", "Side by side"]];
const KEEP = 500; // milliseconds between two times that a growing answer is kept: more is not lost where the page is killed

export class Chat {
  constructor(facts, store, drafts) {
    this.facts = facts;
    this.store = store;
    this.drafts = drafts;
    this.running = new Map(); // conversations in which an answer is written, with what stops it
    this.news = new Map(); // conversations in which an answer ended unseen: "answered" or "failed"
    this.conversation = store.add();
    this.settings = new Settings(store, facts);
    this.presets = new Presets((text) => {
      Object.assign(this.conversation, { system: text, changed: Date.now() });
      store.save(this.conversation);
    });
    this.conversation.system = this.presets.initial;
    this.question = byId("question");
    this.send = byId("send");
    this.attachments = new Attachments(facts.images);
    this.gauge = new ContextGauge(facts.context_length);
    this.messages = new Messages({
      again: (node) => this.again(node),
      goOn: (node) => this.goOn(node),
      edit: (node, content) => this.edit(node, content),
      choose: (node) => this.choose(node),
      watch: (answer) => this.watch(answer),
      measure: (messages) => this.gauge.show(messages),
      waits: () => this.waits(),
    });
    const help = shortcuts([
      ["KeyN", "N", "new conversation", () => this.open(this.fresh())],
      ["KeyF", "F", "search in conversations", () => this.find()],
      ["ArrowDown", "↓", "next conversation of the list", () => this.sidebar.step(1)],
      ["ArrowUp", "↑", "previous conversation", () => this.sidebar.step(-1)],
    ]);
    this.sidebar = new Sidebar(store, this, help);
    this.makeModes();
    this.listen();
    this.turnTo(store.conversations.find((one) => !one.empty) ?? this.conversation);
    store.follow((one) => this.running.has(one), (one) => this.changedElsewhere(one));
    this.resume();
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
    send.addEventListener("click", () => (this.running.has(this.conversation) ? this.stop(this.conversation) : this.submit()));
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop(this.conversation);
    });
    const toggle = (button, panel, what) => byId(button).addEventListener("click", () => {
      const shown = byId(button).getAttribute("aria-expanded") !== "true";
      byId(button).setAttribute("aria-expanded", shown);
      what(shown, byId(panel));
    });
    toggle("settings-toggle", "settings", (shown, panel) => { panel.hidden = !shown; });
    toggle("drafts-toggle", "drafts", (shown) => byId("chat").toggleAttribute("data-no-drafts", !shown));
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight}px`;
  }

  // -- conversations --

  /** The one without messages. */
  fresh() {
    const one = this.store.conversations.find(({ empty }) => empty) ?? this.store.add();
    one.system ||= this.presets.initial;
    return one;
  }

  open(conversation) {
    if (!byId("chat").hasAttribute("data-shown")) location.hash = "#chat";
    this.turnTo(conversation);
  }

  turnTo(conversation) {
    this.conversation = conversation;
    byId("chat").removeAttribute("data-list");
    byId("list-toggle").setAttribute("aria-expanded", false);
    this.settings.open(conversation);
    this.presets.draw();
    this.messages.show(conversation, () => this.welcome());
    this.drafts.empty();
    const runs = conversation.messages.at(-1)?.answers?.find((answer) => answer.running && answer.trace);
    if (runs) this.watch(runs);
    this.shown();
    this.busy();
    this.question.focus();
  }

  /** The open conversation can be seen: what happened in it is no news any more. */
  shown() {
    if (!this.seen(this.conversation)) return;
    if (this.news.delete(this.conversation)) this.lookAtError(this.conversation.messages.at(-1));
    document.querySelectorAll(".notice[data-name]").forEach((one) => { if (one.dataset.name === `failed ${this.conversation.id}`) one.remove(); });
    this.messages.follow();
    this.sidebar.draw();
  }

  seen(conversation) {
    return conversation === this.conversation && byId("chat").hasAttribute("data-shown") && !document.hidden;
  }

  /** What the list says of a conversation. */
  stateOf(conversation) {
    return this.running.has(conversation) ? "running" : this.news.get(conversation);
  }

  find() {
    this.open(this.conversation);
    this.sidebar.find();
  }

  /** Another tab saved `one`, or removed some. */
  changedElsewhere(one) {
    if (!one && !this.store.conversations.includes(this.conversation)) this.open(this.fresh());
    else if (one === this.conversation && !this.messages.editing && !this.running.has(one)) this.draw();
    else this.sidebar.draw();
  }

  /** Draws the open conversation again, where it is scrolled to. */
  draw() {
    this.messages.show(this.conversation, () => this.welcome(), true);
    this.sidebar.draw();
  }

  welcome() {
    const example = (words) => h("button", { type: "button", onclick: () => { this.question.value = words; this.submit(); } }, words);
    const drafts = this.facts.algorithm === "none" ? "" : " While it answers you see which tokens are drafted, and which of them are accepted.";
    return h("div", { class: "welcome" }, h("h2", {}, `Talk to ${this.facts.model}`),
      h("p", {}, `It runs on this server alone.${drafts}`), h("div", { class: "examples" }, EXAMPLES.map(example)));
  }

  // -- asking --

  /** Whether an answer runs in the open conversation, so that nothing else can be asked there; says so. */
  waits() {
    const is = this.running.has(this.conversation);
    if (is) byId("refused").textContent = "An answer is still being written here. Stop it with Escape, or wait: your text stays.";
    return is;
  }

  /** The same of a message that is being changed, whose form would be gone. */
  refused() {
    if (this.messages.editing) byId("refused").textContent = "Send or cancel the message that you edit first.";
    return this.messages.editing || this.waits();
  }

  submit() {
    if (this.refused() || !this.settings.valid()) return;
    const words = this.question.value.trim();
    if (!words && this.attachments.empty) return;
    const { content, images } = this.attachments.take(words);
    this.question.value = "";
    this.fit();
    const { conversation } = this;
    this.answer(conversation.add(conversation.messages.at(-1), "user", content, images.length ? { images } : {}));
  }

  /** Another version of a question, which is asked, or of an answer. */
  edit(node, content) {
    const { conversation } = this;
    const parent = conversation.before(node).at(-1);
    if (node.role === "user") {
      this.answer(conversation.add(parent, "user", content, node.images ? { images: node.images } : {}));
      return;
    }
    const { drafts } = node.answers[0];
    conversation.add(parent, "assistant", content, { edited: true, answers: [{ content, reasoning: "", drafts, tokens: null, seconds: 0 }] });
    this.store.save(conversation);
    this.draw();
    this.question.focus();
  }

  again(node) {
    if (this.refused() || !this.settings.valid()) return;
    this.question.focus(); // the button goes, and Escape is heard here
    this.answer(this.conversation.before(node).at(-1), node);
  }

  /** Another version of an answer, which begins with what the first one has. */
  goOn(node) {
    if (this.refused() || !this.settings.valid()) return;
    this.question.focus();
    this.answer(this.conversation.before(node).at(-1), null, node);
  }

  choose(node) {
    if (this.messages.editing) return;
    this.conversation.choose(node);
    this.store.save(this.conversation);
    this.draw();
  }

  /** Asks `question`, the newest message of a path. failed: an answer to it, whose place is taken if it has no text.
   * begun: an answer to it that is continued. */
  async answer(question, failed = null, begun = null) {
    const { conversation, mode } = this;
    const traced = byId("drafts-toggle").getAttribute("aria-expanded") === "true";
    const body = this.body(conversation, question, begun);
    // With drafts first: what it writes must not be there to be looked up.
    const kinds = mode === "both" && !begun ? [true, false] : [mode !== "off"];
    const answers = kinds.map((drafts) => newAnswer(drafts, traced));
    if (begun) {
      answers[0].begun = { content: begun.content, reasoning: begun.answers[0].reasoning };
      Object.assign(answers[0], answers[0].begun);
    }
    if (answers.length > 1) body.seed ??= Math.floor(Math.random() * 2 ** 31);
    const empty = failed?.answers.every(({ content, reasoning }) => !content && !reasoning);
    const node = empty ? failed : conversation.add(question, "assistant", "");
    Object.assign(node, { answers, changed: Date.now() });
    await this.written(conversation, node, answers, body);
  }

  /** Answers that the server went on with when the page was closed, or the tab that asked is. */
  resume() {
    for (const conversation of this.store.conversations) {
      const kept = conversation.nodes.flatMap(({ id, answers }) => (answers ?? []).map((answer) => ({ node: id, ...answer.kept })));
      for (const { node: of, id } of kept.filter((one) => one.id)) {
        alone(id, () => {
          const node = conversation.nodes.find((one) => one.id === of);
          const answer = node?.answers.find((one) => one.kept?.id === id);
          return answer && !this.running.has(conversation) && this.written(conversation, node, [answer], null, resumed(answer));
        });
      }
    }
  }

  /** Has answers written one after the other. body: what is asked, null: of one that the server has been asked for.
   * settle: is called when they are there, or will not come. */
  async written(conversation, node, answers, body, settle = () => {}) {
    const control = new AbortController();
    this.running.set(conversation, control);
    if (body) this.store.save(conversation); // else what is kept may be more than comes
    this.sidebar.draw();
    if (conversation === this.conversation) this.messages.show(conversation, () => this.welcome());
    this.busy();
    speak("The answer begins.");
    for (const answer of answers) {
      if (control.signal.aborted) Object.assign(answer, { finish: "stopped", running: false });
      else await this.one(conversation, node, answer, body, control.signal);
    }
    settle();
    this.running.delete(conversation);
    this.ended(conversation, node);
  }

  async one(conversation, node, answer, body, signal) {
    const visible = () => conversation === this.conversation;
    if (answer.trace && visible()) this.watch(answer);
    let begun = false;
    let keeping = null;
    const keep = () => {
      keeping = null;
      if (!this.store.conversations.includes(conversation)) return; // it was deleted meanwhile
      fill(node);
      this.store.save(conversation, true);
    };
    const changed = () => {
      keeping ??= setTimeout(keep, node.content ? KEEP : 0); // what comes first at once
      if (!visible()) return;
      this.messages.grown(answer);
      if (!answer.trace?.steps.length) return;
      if (begun) this.drafts.grown(answer.trace);
      else this.watch(answer);
      begun = true;
    };
    if (body) {
      answer.kept = newKept();
      keep(); // nothing may come for long, and the tab be closed
      await alone(answer.kept.id, () => run(answer, body, signal, changed));
    } else await run(answer, null, signal, changed);
    clearTimeout(keeping);
    if (!visible()) return;
    this.messages.ended(node, answer);
    if (answer.trace && answer.trace === this.drafts.trace) this.watch(answer);
  }

  ended(conversation, node) {
    const { answers } = node;
    const error = answers.find((answer) => answer.error)?.error;
    fill(node);
    if (!this.store.conversations.includes(conversation)) return; // it was deleted meanwhile
    this.store.save(conversation);
    if (!this.seen(conversation)) {
      this.news.set(conversation, error ? "failed" : "answered");
      if (error) {
        notice(`failed ${conversation.id}`, `The answer in “${conversation.title}” failed. ${error}`, [["Show", () => this.open(conversation)]]);
      }
    }
    speak(error ? `There was an error in ${conversation.title}.` : `The answer is complete: ${figures(answers[0])}.`);
    this.sidebar.draw();
    if (conversation !== this.conversation) return;
    this.busy();
    if (!this.messages.editing) this.messages.show(conversation, () => this.welcome(), true);
    this.messages.follow();
    this.lookAtError(node);
    if (answers.length > 1 && answers[0].trace) this.watch(answers[0]);
    if ([document.body, this.send].includes(document.activeElement)) this.question.focus();
  }

  lookAtError(node) {
    const failed = node?.answers?.find((answer) => answer.error);
    if (failed) this.messages.showError(failed);
  }

  stop(conversation) {
    this.running.get(conversation)?.abort();
  }

  busy() {
    const is = this.running.has(this.conversation);
    this.send.textContent = is ? "Stop" : "Send";
    this.send.toggleAttribute("data-stops", is);
    byId("refused").textContent = "";
  }

  /** Shows how an answer is drafted. */
  watch(answer) {
    const path = this.conversation.messages;
    const asked = path.slice(0, Math.max(path.findIndex(({ answers }) => answers?.includes(answer)), 0));
    this.drafts.open(answer.trace, () => rateOf(answer), Boolean(answer.running), asked.flatMap(picturesOf));
  }

  body(conversation, question, begun) {
    const system = conversation.system.trim();
    const path = [...conversation.before(question), question];
    // Templates may want turns to alternate: a question that got no answer is not asked again with the next one.
    const answered = (one, i) => (one.content || picturesOf(one).length) && path[i + 1]?.content !== "";
    const said = [...path.filter(answered), ...(begun ? [begun] : [])].map((one) => ({ role: one.role, content: contentOf(one) }));
    const messages = system ? [{ role: "system", content: system }, ...said] : said;
    const more = begun ? { continue_final_message: true } : {};
    return { model: this.facts.model, messages, ...this.settings.sampling, ...more };
  }
}

/** Does it in one tab at a time, by name, where the browser can see to that: it does so for pages over https, and of this
 * computer. */
const alone = (name, what) => navigator.locks?.request(`draftwing ${name}`, what) ?? what();

/** Takes over what the answers of a message have so far. */
function fill(node) {
  node.content = node.answers.map(({ content }) => content).find(Boolean) ?? "";
  node.changed = Date.now();
}
