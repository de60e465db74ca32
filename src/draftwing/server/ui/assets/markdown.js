// Markdown of messages, as elements. marked makes tokens of it, never HTML: whatever is no markdown becomes text nodes.

import { CodeBlock } from "./code.js";
import { h } from "./dom.js";
import { formula, takeFormula } from "./math.js";
import { Lexer, Marked } from "./vendor/marked.js";

// Above these a text is shown as it is: patterns take the square of it, at worst more.
const LONG = 10000; // characters of a paragraph, an item or a cell
const MARKS = 400; // signs of emphasis in one
const GAP = /[ \t]{1000}/;
const DEEP = 40; // blocks inside of each other, from which on they are shown as they are
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", mdash: "—", ndash: "–", hellip: "…", times: "×" };
const LINK = /^(https?:\/\/|mailto:)/i;

const { defaults: OPTIONS } = new Marked({ gfm: true, breaks: true }, { extensions: [
  {
    name: "math", level: "inline",
    start: (text) => first(text.indexOf("$"), text.indexOf("\\("), text.indexOf("\\[")),
    tokenizer: (text) => takeFormula(text),
  },
  {
    name: "display", level: "block",
    start: (text) => first(text.indexOf("\n$$"), text.indexOf("\n\\[")),
    tokenizer: (text) => displayed(text),
  },
  {
    name: "footnote", level: "inline",
    start: (text) => first(text.indexOf("[^")),
    tokenizer: (text) => found("footnote", /^\[\^([^\]\s]{1,40})\]/.exec(text)),
  },
  {
    name: "note", level: "block",
    tokenizer(text) {
      const token = found("note", /^\[\^([^\]\s]{1,40})\]:[ \t]+([^\n]+)(?:\n|$)/.exec(text));
      return token && { ...token, tokens: this.lexer.inline(token.text) };
    },
  },
] });

const VIEWS = new WeakMap(); // what grows a block of code or a table, by its element
const first = (...places) => Math.min(...places.map((at) => (at < 0 ? Infinity : at)));
const found = (type, match) => match && { type, raw: match[0], name: match[1], text: match[2] };

/** A formula that has lines for itself. */
function displayed(text) {
  const token = takeFormula(text);
  if (!token?.display) return undefined;
  const rest = /^[ \t]*(?:\n|$)/.exec(text.slice(token.raw.length, token.raw.length + 200));
  return rest ? { ...token, type: "display", raw: token.raw + rest[0] } : undefined;
}

class Reader extends Lexer {
  inlineTokens(text, tokens = []) {
    const marks = text.length > MARKS ? text.match(/[*_~]/g)?.length ?? 0 : 0;
    if (text.length <= LONG && marks <= MARKS) return super.inlineTokens(text, tokens);
    tokens.push({ type: "text", raw: text, text });
    return tokens;
  }
}

/** Tokens of the blocks of a text. Joined, what is `raw` in them is the text. links: addresses that the text before
 * gave names to, which this one adds to. */
export function blocks(text, links = {}) {
  const reader = new Reader({ ...OPTIONS });
  reader.tokens.links = links;
  try {
    if (!GAP.test(text)) return [...reader.lex(text)];
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // too deep for the stack
  }
  return [{ type: "long", raw: text }];
}

/** Elements for a text. */
export function markdown(text) {
  return blocks(clean(text)).map((token) => block(token, 0)).filter(Boolean);
}

const clean = (text) => text.replace(/\r\n?/g, "\n");

/** A text that grows: what is finished is neither read nor made again. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.text = "";
    this.done = 0; // characters whose elements stay as they are
    this.links = {}; // addresses with names
    this.tail = []; // { token, element } of the blocks that may change yet
    this.code = null; // the block of code at the end, while no line ends it
    this.element.replaceChildren();
  }

  show(whole) {
    const text = clean(whole);
    if (!text.startsWith(this.text)) this.clear();
    if (text === this.text) return;
    this.text = text;
    if (this.code && this.grow()) return;
    const tokens = blocks(text.slice(this.done), { ...this.links });
    this.place(tokens);
    this.settle(tokens);
  }

  /** Adds to the code at the end; false when a line ends it. */
  grow() {
    const { ends, from, view } = this.code;
    const body = this.text.slice(this.done + from);
    const line = body.lastIndexOf("\n", this.code.seen - 1) + 1; // where what is new begins, or the line that it is in
    if (ends.test(body.slice(line))) {
      this.code = null;
      return false;
    }
    this.code.seen = body.length;
    view.grow(bare(body));
    return true;
  }

  place(tokens) {
    const same = tokens.findIndex((token, i) => token.raw !== this.tail[i]?.token.raw || token.type !== this.tail[i].token.type);
    let from = same < 0 ? tokens.length : same;
    if (from < tokens.length && this.tail[from] && longer(this.tail[from], tokens[from])) {
      this.tail[from].token = tokens[from];
      from += 1;
    }
    this.tail.slice(from).forEach(({ element }) => element?.remove());
    const made = tokens.slice(from).map((token) => ({ token, element: block(token, 0) }));
    this.element.append(...made.map(({ element }) => element).filter(Boolean));
    this.tail = [...this.tail.slice(0, from), ...made];
  }

  /** Lets all blocks alone but the last two, which more text may change; of code at the end only more comes. */
  settle(tokens) {
    const last = tokens.findLastIndex(seen);
    const [head, fence] = tokens[last]?.type === "code" ? /^(`{3,}|~{3,})[^\n]*\n/.exec(tokens[last].raw) ?? [] : [];
    const ends = fence && new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`, "m");
    const open = fence && !ends.test(tokens[last].raw.slice(head.length));
    const keep = open ? last : Math.max(tokens.findLastIndex((token, i) => i < last && seen(token)), 0);
    for (const { type, raw, tag, href, title } of tokens.slice(0, keep)) {
      this.done += raw.length;
      if (type === "def") this.links[tag] ??= { href, title };
    }
    this.tail = this.tail.slice(keep);
    if (open) this.code = { ends, from: head.length, seen: this.text.length - this.done - head.length, view: VIEWS.get(this.tail[0].element) };
  }
}

const seen = ({ type }) => type !== "space";

/** The element of a block; null for what is not seen. */
function block(token, depth) {
  if (depth > DEEP) return h("p", {}, token.raw);
  switch (token.type) {
    case "space": case "def": return null;
    case "heading": return h(`h${Math.min(token.depth + 2, 6)}`, {}, inline(token.tokens));
    case "hr": return h("hr");
    case "code": return codeBlock(token);
    case "display": return formula(token.tex, true, token.raw);
    case "blockquote": return h("blockquote", {}, inside(token.tokens, depth));
    case "list": return list(token, depth);
    case "table": return table(token);
    case "paragraph": return h("p", {}, inline(token.tokens));
    case "text": return h("p", {}, token.tokens ? inline(token.tokens) : decoded(token.text));
    case "note": return h("p", { class: "footnote" }, h("sup", {}, token.name), " ", inline(token.tokens));
    case "html": return h("p", {}, html(token.raw.trimEnd()));
    default: return h("p", {}, token.raw.trim());
  }
}

const inside = (tokens, depth) => tokens.map((token) => block(token, depth + 1)).filter(Boolean);

function codeBlock({ text, lang }) {
  const view = new CodeBlock(bare(text), /^[^\s{,]*/.exec(lang ?? "")[0]);
  VIEWS.set(view.element, view);
  return view.element;
}

/** A text without line breaks at its end. */
function bare(text) {
  let end = text.length;
  while (text[end - 1] === "\n") end -= 1;
  return text.slice(0, end);
}

function list(token, depth) {
  const { items, ordered, start } = token;
  const first = ordered && start !== 1 && start !== "" ? { start } : {};
  return h(ordered ? "ol" : "ul", first, items.map((item) => listItem(item, depth)));
}

function listItem({ tokens, task, checked, loose }, depth) {
  const box = task && h("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" });
  const body = tokens.filter(({ type }) => type !== "checkbox")
    .map((token) => (token.type === "text" && !loose ? inline(token.tokens ?? [token]) : block(token, depth + 1)));
  return h("li", { class: task ? "task" : null }, box, body);
}

function table({ header, rows }) {
  const body = h("tbody", {}, rows.map(tableRow));
  const element = h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, header.map((cell) => tableCell("th", cell)))), body));
  VIEWS.set(element, body);
  return element;
}

const tableRow = (cells) => h("tr", {}, cells.map((cell) => tableCell("td", cell)));

function tableCell(tag, { tokens, align }) {
  return h(tag, { scope: tag === "th" ? "col" : null, class: align ? `to-${align}` : null }, inline(tokens));
}

/** Makes a list or a table longer, if it began as the one that is shown, and leaves what is the same; whether it did. */
function longer({ token: old, element }, token) {
  if (token.type !== old.type || !["list", "table"].includes(token.type)) return false;
  const isList = token.type === "list";
  if (isList ? ["ordered", "start", "loose"].some((name) => old[name] !== token[name]) : !sameCells(old.header, token.header)) return false;
  const [before, parts] = isList ? [old.items, token.items] : [old.rows, token.rows];
  const changed = parts.findIndex((part, i) => before[i] === undefined || (isList ? part.raw !== before[i].raw : !sameCells(part, before[i])));
  const keep = changed < 0 ? parts.length : changed;
  const into = isList ? element : VIEWS.get(element);
  [...into.children].slice(keep).forEach((child) => child.remove());
  into.append(...parts.slice(keep).map(isList ? (item) => listItem(item, 0) : tableRow));
  return true;
}

const sameCells = (some, others) => some.length === others.length && some.every(({ text, align }, i) => text === others[i].text && align === others[i].align);

/** Text nodes and elements for the tokens of a line. */
function inline(tokens = [], depth = 0) {
  if (depth > DEEP) return tokens.map(({ raw }) => raw);
  return tokens.flatMap((token) => {
    const within = () => inline(token.tokens, depth + 1);
    switch (token.type) {
      case "strong": case "em": case "del": return h(token.type, {}, within());
      case "codespan": return h("code", {}, token.text);
      case "br": return h("br");
      case "math": return formula(token.tex, token.display, token.raw);
      case "footnote": return h("sup", {}, token.name);
      case "link": return LINK.test(token.href) ? outside(token.href, within()) : token.raw;
      case "image": return image(token);
      case "html": return html(token.raw);
      case "checkbox": return [];
      case "text": return token.tokens ? within() : decoded(token.text);
      case "escape": return token.text;
      default: return token.raw;
    }
  });
}

const outside = (href, ...words) => h("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...words);

/** Images are never loaded: whoever has them would see who reads. */
function image({ href, text, raw }) {
  return LINK.test(href) ? outside(href, `Image: ${text || href}`) : raw;
}

/** Tags are text; a line break, which tables have no other way to write, is one. */
const html = (raw) => raw.split(/(<br\s?\/?>)/i).map((part, i) => (i % 2 ? h("br") : part));

/** A text whose entities are the characters they stand for. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,8}));/g, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
