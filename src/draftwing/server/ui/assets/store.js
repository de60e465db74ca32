// Conversations and settings, kept in this browser: conversations in IndexedDB, one record each, settings in localStorage.
//
// A record is read and merged before it is written (branches.js), in one transaction. So two tabs never overwrite each
// other, and they tell each other what they wrote. Nothing is deleted that nobody deleted.

import { Conversation, toKeep } from "./branches.js";

const NAME = "draftwing";
const RECORDS = "conversations";
const BEFORE = "draftwing-conversations"; // where localStorage had them before
const SETTINGS = "draftwing-settings";
const NO_ROOM = "This browser has no room for more: what is new is forgotten with this tab. Export it, or delete some.";
const NO_STORE = "This browser keeps nothing for this page: conversations are forgotten with this tab.";

export class Store {
  /** failed: is called with words when something could not be kept. */
  constructor(failed) {
    this.failed = failed;
    this.conversations = []; // the newest first
    this.settings = { ...read(SETTINGS) };
    this.database = null;
    this.others = new BroadcastChannel(NAME);
  }

  /** Reads what is kept, before anything else is done with the store. */
  async load() {
    const now = Date.now(); // once: their order is that of the list
    const before = [read(BEFORE) ?? []].flat().map((one, i) => [one, Conversation.from(one, now - i)]);
    const old = before.map(([, one]) => one).filter(Boolean);
    try {
      this.database = await opened();
      if (old.length) {
        await this.change((records) => old.forEach((one) => put(records, one)));
        const rest = before.filter(([, one]) => !one).map(([data]) => data);
        if (rest.length) localStorage.setItem(BEFORE, JSON.stringify(rest));
        else localStorage.removeItem(BEFORE);
      }
      const kept = await result(this.database.transaction(RECORDS).objectStore(RECORDS).getAll());
      this.conversations = kept.map((one) => Conversation.from(one)).filter(Boolean);
    } catch {
      this.failed(this.database ? NO_ROOM : NO_STORE);
      this.conversations = old;
    }
    this.sort();
  }

  sort() {
    this.conversations.sort((a, b) => b.newest - a.newest);
  }

  add(one = new Conversation()) {
    this.conversations.unshift(one);
    return one;
  }

  /** Keeps a conversation; an empty one is not worth it. quiet: other tabs need not look yet. */
  async save(one, quiet = false) {
    this.sort();
    if (one.empty) return;
    await this.tried((records) => put(records, one), quiet ? null : { saved: one.id });
  }

  /** Takes in conversations of a file, or that were removed. Returns them as they are here. */
  async take(conversations) {
    const taken = conversations.map((one) => {
      const known = this.conversations.find(({ id }) => id === one.id);
      known?.merge(one);
      return known ?? this.add(one);
    });
    for (const one of taken) await this.save(one);
    return taken;
  }

  async remove(conversations) {
    this.conversations = this.conversations.filter((one) => !conversations.includes(one));
    const ids = conversations.map(({ id }) => id);
    await this.tried((records) => ids.forEach((id) => records.delete(id)), { removed: ids });
  }

  /** Follows other tabs: calls `changed` with a conversation that another one has saved, or null if some were removed.
   * keeps: whether a conversation stays here though another tab removed it. */
  follow(keeps, changed) {
    this.others.onmessage = async ({ data: { saved, removed } }) => {
      if (removed) {
        this.conversations = this.conversations.filter((one) => !removed.includes(one.id) || keeps(one));
        return changed(null);
      }
      if (!this.database) return null;
      const found = Conversation.from(await result(this.database.transaction(RECORDS).objectStore(RECORDS).get(saved)));
      if (!found) return null;
      const known = this.conversations.find(({ id }) => id === saved);
      known?.merge(found);
      const one = known ?? this.add(found);
      this.sort();
      return changed(one);
    };
  }

  async tried(what, news) {
    if (!this.database) return;
    try {
      await this.change(what);
      if (news) this.others.postMessage(news);
    } catch {
      this.failed(NO_ROOM);
    }
  }

  /** A transaction, until it is on disk. */
  change(what) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(RECORDS, "readwrite");
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
      what(transaction.objectStore(RECORDS));
    });
  }

  saveSettings() {
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
    } catch {
      this.failed(NO_ROOM);
    }
  }
}

function put(records, one) {
  const before = records.get(one.id);
  before.onsuccess = () => {
    const kept = Conversation.from(before.result);
    if (kept) one.merge(kept);
    records.put(toKeep(one));
  };
}

function opened() {
  const asked = indexedDB.open(NAME, 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore(RECORDS, { keyPath: "id" });
  return result(asked);
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}
