// The list of conversations: search, names, deleting, files.

import { wordsOf } from "./branches.js";
import { byId, h, number } from "./dom.js";
import { asked, askedText, menu, notice } from "./overlays.js";
import { download, fileName, fromJson, toJson, toMarkdown } from "./transfer.js";

const STATES = { running: "answering", failed: "failed", answered: "new answer" };

export class Sidebar {
  /** chat: opens a conversation (`open`, `fresh`), knows the open one (`conversation`) and what each does (`stateOf`).
   * help: shows the shortcuts. */
  constructor(store, chat, help) {
    this.store = store;
    this.chat = chat;
    this.list = byId("conversations");
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.search.value) return;
      event.stopPropagation(); // it empties the field, and stops no answer
      this.search.value = "";
      this.draw();
    });
    this.file = h("input", { type: "file", accept: ".json,application/json", multiple: true, hidden: true, "aria-label": "Files to import" });
    this.file.addEventListener("change", () => this.import());
    byId("list-menu").replaceWith(menu("⋯", "More actions", () => [
      ["Import from a file", () => this.file.click()],
      ...(this.kept.length ? [
        ["Export all as JSON", () => download("draftwing-conversations.json", toJson(this.kept), "application/json")],
        ["Delete all", () => this.removeAll()],
      ] : []),
      ["Keyboard shortcuts", help],
    ], "above"), this.file);
    byId("one-menu").replaceWith(menu("⋯", "Actions for this conversation", () => this.actions(chat.conversation), "end"));
    byId("new").addEventListener("click", () => chat.open(chat.fresh()));
    byId("list-toggle").addEventListener("click", () => this.toggle(true));
    byId("list-close").addEventListener("click", () => this.toggle(false));
    byId("sidebar").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !byId("chat").hasAttribute("data-list")) return;
      event.stopPropagation();
      this.toggle(false);
    });
  }

  /** On a narrow screen the list takes the place of the conversation. */
  toggle(shown) {
    byId("chat").toggleAttribute("data-list", shown);
    byId("list-toggle").setAttribute("aria-expanded", shown);
    if (shown) this.search.focus();
    else byId("list-toggle").focus();
  }

  /** Puts the cursor into the search. */
  find() {
    if (byId("list-toggle").checkVisibility()) this.toggle(true);
    else this.search.focus();
  }

  get kept() {
    return this.store.conversations.filter((one) => !one.empty);
  }

  /** Conversations in the list, each with the text that was found in it. */
  get found() {
    const words = wordsOf(this.search.value);
    const listed = this.store.conversations.filter((one) => !one.empty || (one === this.chat.conversation && !words.length));
    return listed.map((one) => [one, words.length ? one.find(words) : ""]).filter(([, text]) => text !== null);
  }

  draw() {
    const { found } = this;
    this.list.replaceChildren(...found.map(([one, text]) => this.row(one, text)));
    const searched = Boolean(this.search.value.trim());
    byId("found").textContent = searched ? `${found.length ? number(found.length) : "Nothing"} found` : "";
    byId("title").textContent = nameOf(this.chat.conversation);
  }

  row(one, text) {
    const { chat } = this;
    const state = STATES[chat.stateOf(one)];
    const mark = state && h("span", { class: "mark-of", "data-state": chat.stateOf(one), title: state }, h("span", { class: "unseen" }, `, ${state}`));
    const open = h("button", { type: "button", class: "open", title: nameOf(one), onclick: () => chat.open(one) },
      h("span", { class: "name" }, nameOf(one)), mark, text && h("span", { class: "snippet" }, text));
    if (one === chat.conversation) open.setAttribute("aria-current", "true");
    const tool = (sign, words, what) => h("button", { type: "button", "aria-label": `${words} ${nameOf(one)}`, title: words, onclick: what }, sign);
    const tools = h("span", { class: "tools" },
      !one.empty && tool("✎", "Rename", () => this.rename(one)), tool("×", "Delete", () => this.remove(one)));
    return h("li", { "data-open": one === chat.conversation }, open, tools);
  }

  actions(one) {
    if (one.empty) return [["Import from a file", () => this.file.click()]];
    return [
      ["Rename", () => this.rename(one)],
      ["Export as JSON", () => download(fileName(one.title, "json"), toJson([one]), "application/json")],
      ["Export as Markdown", () => download(fileName(one.title, "md"), toMarkdown(one), "text/markdown")],
      ["Delete", () => this.remove(one)],
    ];
  }

  async rename(one) {
    const title = await askedText("Rename the conversation", "Name", one.title, "Rename");
    if (title === null) return;
    Object.assign(one, { title, changed: Date.now() });
    this.store.save(one);
    this.draw();
  }

  remove(one) {
    this.gone([one], `Deleted “${one.title}”.`);
  }

  async removeAll() {
    const all = this.kept;
    const many = all.length === 1 ? "the conversation" : `all ${number(all.length)} conversations`;
    const question = h("p", {}, "They are deleted in this browser, which is the only place where they are. Export them first to keep a copy.");
    if (await asked(`Delete ${many}?`, question, "Delete")) this.gone(all, `Deleted ${many}.`);
  }

  /** Deletes at once, and offers to take it back. */
  gone(conversations, words) {
    const { chat, store } = this;
    const seen = conversations.includes(chat.conversation) && chat.conversation;
    conversations.forEach((one) => chat.stop(one));
    store.remove(conversations);
    if (seen) chat.open(chat.fresh());
    else this.draw();
    if (conversations.every(({ empty }) => empty)) return;
    const back = async () => {
      await store.take(conversations);
      if (seen) chat.open(seen);
      else this.draw();
    };
    notice("deleted", words, [["Undo", back]], true);
    document.querySelector("[data-name=deleted] button").focus();
  }

  async import() {
    const found = [];
    for (const file of this.file.files) {
      try {
        found.push(...fromJson(await file.text()));
      } catch (error) {
        notice("import", `${file.name} was not imported. ${error.message}`);
      }
    }
    this.file.value = ""; // the same one may be chosen again
    if (!found.length) return;
    const [first] = await this.store.take(found);
    this.chat.open(first);
    notice("imported", found.length === 1 ? `Imported “${first.title}”.` : `Imported ${number(found.length)} conversations.`, [], true);
  }

  /** Opens the conversation that stands `by` rows below the open one. */
  step(by) {
    const listed = this.found.map(([one]) => one);
    const at = listed.indexOf(this.chat.conversation);
    const next = at < 0 ? listed.at(by > 0 ? 0 : -1) : listed[at + by];
    if (next) this.chat.open(next);
  }
}

const nameOf = (one) => one.title || "New conversation";
