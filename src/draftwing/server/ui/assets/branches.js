// A conversation is a tree of messages. Editing or asking again adds a version, and no message is ever taken out.
//
// conversation: { id, title, system, changed, chosen, nodes }
//   changed  when the title or the system prompt was changed, in milliseconds since 1970
//   chosen   { parent: version }: ids of the message that is shown below another one; the parent of a first message is ""
//   nodes    all messages, the oldest first
// node: { id, parent, role, content, made, changed, answers, edited }
//   parent   id of the message before it, "" for a first one. Nodes with one parent are versions of the same message.
//   made, changed  milliseconds since 1970
//   answers  of an assistant's message: one, or two that were asked side by side; `content` is the first with a text
//   edited   whether somebody changed an answer's text
//
// Two copies of a conversation, of two tabs or of a file, are merged: all nodes of both, the newer one of those with the
// same id. What else a message has (attachments, figures) is kept as it is, if it is JSON.

const PASSING = new Set(["trace", "probabilities", "running"]); // too large to keep, or of the moment
const TITLE = 46; // characters

export class Conversation {
  constructor(fields = {}) {
    Object.assign(this, { id: newId(), title: "", system: "", changed: Date.now(), chosen: {}, nodes: [] }, fields);
  }

  /** A conversation of what was stored or imported; null if it is none. now: when one of an older version was made. */
  static from(data, now = Date.now()) {
    const found = Array.isArray(data?.messages) ? ofMessages(data, now) : data;
    if (typeof found?.id !== "string" || typeof found.system !== "string" || !Array.isArray(found.nodes)) return null;
    if (!found.nodes.length || !found.nodes.every(isNode)) return null;
    const { id, system, chosen, nodes } = found;
    const title = typeof found.title === "string" && found.title ? found.title : titleOf(nodes[0].content);
    const one = new Conversation({ id, title, system, changed: Number(found.changed) || 0, nodes: [] });
    one.chosen = Object.fromEntries(Object.entries(chosen ?? {}).filter(([, version]) => typeof version === "string"));
    one.merge({ ...one, nodes });
    return one;
  }

  get empty() {
    return !this.nodes.length;
  }

  /** When its newest message was made; one without any is the newest of all. */
  get newest() {
    return this.nodes.at(-1)?.made ?? Infinity;
  }

  /** The messages that are shown, from the first one on. */
  get messages() {
    const below = grouped(this.nodes);
    const path = [];
    for (let parent = ""; below.has(parent); parent = path.at(-1).id) {
      const versions = below.get(parent);
      path.push(versions.find(({ id }) => id === this.chosen[parent]) ?? versions.at(-1));
    }
    return path;
  }

  /** The messages before a node, from the first one on. */
  before(node) {
    const named = new Map(this.nodes.map((one) => [one.id, one]));
    const path = [];
    for (let at = named.get(node.parent); at; at = named.get(at.parent)) path.unshift(at);
    return path;
  }

  /** A node and its siblings, the oldest first. */
  versions(node) {
    return this.nodes.filter(({ parent }) => parent === node.parent);
  }

  /** Shows a version, and below it what was shown there last. */
  choose(node) {
    this.chosen[node.parent] = node.id;
  }

  /** Adds a message below `parent` (a node, or null for a first message) and shows it. more: further fields. */
  add(parent, role, content, more = {}) {
    const made = Math.max(Date.now(), (this.nodes.at(-1)?.made ?? 0) + 1);
    const node = { id: newId(), parent: parent?.id ?? "", role, content, made, changed: made, ...more };
    this.nodes.push(node);
    this.choose(node);
    this.title ||= titleOf(content);
    return node;
  }

  /** Takes over what another copy has and this one lacks; what is shown stays. */
  merge(other) {
    const own = new Map(this.nodes.map((node) => [node.id, node]));
    for (const node of other.nodes) {
      const mine = own.get(node.id);
      if (!mine) own.set(node.id, node);
      else if (node.changed > mine.changed) Object.assign(mine, node);
    }
    this.nodes = [...own.values()].sort((a, b) => a.made - b.made || (a.id < b.id ? -1 : 1));
    if (other.changed > this.changed) ({ title: this.title, system: this.system, changed: this.changed } = other);
    this.chosen = { ...other.chosen, ...this.chosen };
  }

  /** Looks for words, in all versions. Returns the text around one of them, "" if the title has them; null if one is
   * nowhere. */
  find(words) {
    const texts = this.nodes.flatMap(({ content, answers }) => answers?.map((answer) => answer.content) ?? content);
    const had = texts.map((text) => words.filter((word) => folded(text).includes(word)));
    const inTitle = words.filter((word) => folded(this.title).includes(word));
    if (!words.every((word) => inTitle.includes(word) || had.some((some) => some.includes(word)))) return null;
    const most = Math.max(...had.map(({ length }) => length));
    if (!most || inTitle.length === words.length) return "";
    const at = had.findIndex(({ length }) => length === most);
    return around(texts[at], folded(texts[at]).indexOf(had[at][0]));
  }
}

/** What is looked for: words in small letters, without accents. */
export const wordsOf = (text) => folded(text).split(/\s+/).filter(Boolean);

/** A copy to keep. What an answer that runs has so far is kept as one that was stopped. */
export function toKeep(conversation) {
  const text = JSON.stringify(conversation, (name, value) => {
    if (PASSING.has(name)) return undefined;
    return value?.running ? { ...value, finish: "stopped" } : value;
  });
  return JSON.parse(text);
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

/** crypto.randomUUID is for pages over https alone. */
function newId() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

function folded(text) {
  return text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();
}

function around(text, at) {
  const from = Math.max(at - 20, 0);
  return `${from ? "…" : ""}${text.slice(from, from + 90).replace(/\s+/g, " ")}`;
}

/** Nodes by the id of their parent. */
function grouped(nodes) {
  const found = new Map(nodes.map(({ parent }) => [parent, []]));
  for (const node of nodes) found.get(node.parent).push(node);
  return found;
}

/** One message after the other, as versions before branches had it: the same ids whenever it is read. */
function ofMessages(data, now) {
  const nodes = data.messages.map((message, i) => {
    return { ...message, id: `m${i}`, parent: i ? `m${i - 1}` : "", made: now, changed: now };
  });
  return { ...data, changed: now, chosen: {}, nodes };
}

function isNode(node) {
  const says = (each) => typeof each?.content === "string";
  const named = [node?.id, node?.parent].every((id) => typeof id === "string") && node.id;
  const answered = node?.role === "user" || (node?.role === "assistant" && Array.isArray(node.answers) && node.answers.length);
  return Boolean(named && says(node) && answered && (node.answers ?? []).every(says) && isFinite(node.made) && isFinite(node.changed));
}
