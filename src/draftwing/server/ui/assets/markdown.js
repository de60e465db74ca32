// Markdown of answers, as elements. It never parses HTML: whatever is not markdown is text.

import { copyButton, h } from "./dom.js";

const FENCE = /^\s{0,3}(```+|~~~+)\s*([^\s`]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/s;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^[\s:|-]+$/; // with a dash in it

// Characters from which on a line, a cell or an item is taken as it is. What a model writes is drawn many times while it
// grows, so no pattern may have two neighbours that match the same; INLINE takes the square of a text at worst.
const LONG = 2000;

/** Elements for a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const before = at;
    if (!line.trim()) at += 1;
    else if (line.length > LONG) { out.push(h("p", {}, line)); at += 1; }
    else if (FENCE.test(line)) at = fence(lines, at, out);
    else if (HEADING.test(line)) at = heading(line, at, out);
    else if (RULE.test(line)) { out.push(h("hr")); at += 1; }
    else if (/^\s{0,3}>/.test(line) && depth < 8) at = quote(lines, at, out, depth);
    else if (ITEM.test(line) && depth < 8) at = list(lines, at, out, depth);
    else if (ROW.test(line) && divides(lines[at + 1] ?? "")) at = table(lines, at, out);
    if (at === before) at = paragraph(lines, at, out);
  }
  return out;
}

function fence(lines, at, out) {
  const [, marks, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(marks)) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  out.push(h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language), copyButton(() => code)),
    h("pre", { tabindex: "0" }, h("code", {}, code))));
  return end + 1;
}

const divides = (line) => line.includes("-") && DIVIDER.test(line);

function heading(line, at, out) {
  const [, marks, words] = HEADING.exec(line);
  out.push(h(`h${Math.min(marks.length + 2, 5)}`, {}, inline(words.trim().replace(/(^|\s)#+$/, "").trimEnd())));
  return at + 1;
}

function quote(lines, at, out, depth) {
  let end = at;
  while (end < lines.length && /^\s{0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s{0,3}>\s?/, ""));
  out.push(h("blockquote", {}, blocks(inner, depth + 1)));
  return end;
}

function list(lines, at, out, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered) break;
    if (item[1].length < indent.length) break;
    const inner = [item[3]];
    const width = item[0].length - item[3].length;
    for (at += 1; at < lines.length; at += 1) {
      const blank = !lines[at].trim();
      const deeper = /^\s*/.exec(lines[at])[0].length > indent.length + 1;
      if (blank ? !/^\s{2,}\S/.test(lines[at + 1] ?? "") : !deeper) break;
      inner.push(lines[at].slice(Math.min(width, /^\s*/.exec(lines[at])[0].length)));
    }
    items.push(h("li", {}, inner.length === 1 ? inline(inner[0]) : blocks(inner, depth + 1)));
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
  }
  const start = ordered && mark.slice(0, -1) !== "1" ? { start: mark.slice(0, -1) } : {};
  out.push(h(ordered ? "ol" : "ul", start, items));
  return at;
}

function table(lines, at, out) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => inline(cell.trim()));
  const head = cells(lines[at]);
  const body = [];
  for (at += 2; at < lines.length && ROW.test(lines[at]); at += 1) body.push(cells(lines[at]));
  out.push(h("div", { class: "table" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, body.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))))));
  return at;
}

function paragraph(lines, at, out) {
  const words = [lines[at]];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim() || line.length > LONG || FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || /^\s{0,3}>/.test(line)) break;
    words.push(line);
  }
  const parts = words.flatMap((line, i) => [i ? h("br") : null, ...inline(line.trim())]);
  out.push(h("p", {}, parts));
  return at;
}

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*][^*]*)\*|(?<!\w)_([^\s_][^_]*)_(?!\w)|\[([^\]]+)\]\(([^)\s]+)\)/;

/** Text nodes and elements for a piece of a line. */
function inline(text, depth = 0) {
  if (text.length > LONG) return [text];
  const out = [];
  let rest = text;
  for (let found = INLINE.exec(rest); found && depth < 6; found = INLINE.exec(rest)) {
    const [whole, , code, bold, bold2, slanted, slanted2, label, address] = found;
    if (found.index) out.push(rest.slice(0, found.index));
    if (code !== undefined) out.push(h("code", {}, code));
    else if (bold ?? bold2) out.push(h("strong", {}, inline(bold ?? bold2, depth + 1)));
    else if (slanted ?? slanted2) out.push(h("em", {}, inline(slanted ?? slanted2, depth + 1)));
    else out.push(link(label, address, whole));
    rest = rest.slice(found.index + whole.length);
  }
  if (rest) out.push(rest);
  return out;
}

function link(label, address, whole) {
  if (!/^https?:\/\//i.test(address)) return whole;
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label);
}
