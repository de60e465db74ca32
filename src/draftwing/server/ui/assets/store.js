// Conversations and settings, kept in this browser.

import { byId } from "./dom.js";

const NAME = "draftwing-conversations";
const SETTINGS = "draftwing-settings";
const MOST = 100;
const PASSING = new Set(["trace", "running", "views", "verdict"]);

/** A conversation: { id, title, system, messages }; a message: { role, content } and what was measured of an answer. */
export class Store {
  constructor() {
    this.conversations = conversations();
    this.settings = { ...read(SETTINGS) };
  }

  add() {
    const one = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", system: "", messages: [] };
    this.conversations.unshift(one);
    this.conversations.length = Math.min(this.conversations.length, MOST);
    return one;
  }

  remove(one) {
    this.conversations = this.conversations.filter((other) => other !== one);
    this.save();
  }

  /** Empty conversations are not worth keeping; what draws a tree is too large to keep. */
  save() {
    const kept = this.conversations.filter((one) => one.messages.length);
    write(NAME, kept, (name, value) => (PASSING.has(name) ? undefined : value));
  }

  /** Calls `changed` when another tab has saved, whose conversations are here then, too. open: gives the one that this
   * tab may be changing, which stays as it is. */
  follow(open, changed) {
    addEventListener("storage", ({ key }) => {
      if (key !== NAME) return;
      const own = this.conversations.filter((one) => one === open() || !one.messages.length);
      const theirs = conversations().map((one) => own.find(({ id }) => id === one.id) ?? one);
      this.conversations = [...own.filter((one) => !theirs.includes(one)), ...theirs];
      changed();
    });
  }

  saveSettings() {
    write(SETTINGS, this.settings);
  }
}

/** Those that are kept. Another program's page may have had this address before, and kept something else. */
function conversations() {
  const found = read(NAME);
  return Array.isArray(found) ? found.filter(known) : [];
}

function known(one) {
  const says = (each) => typeof each?.content === "string";
  const answered = ({ role, answers }) => role === "user" || (Array.isArray(answers) && answers.every(says));
  return typeof one?.system === "string" && Array.isArray(one.messages) && one.messages.every((each) => says(each) && answered(each));
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function write(name, value, replacer) {
  try {
    localStorage.setItem(name, JSON.stringify(value, replacer));
  } catch {
    // It is full or forbidden: the page works on, and forgets.
    byId("kept").textContent = "This browser has no room for more: what is new is forgotten with this tab.";
  }
}
