// A question as it is shown: its words as markdown, its files as chips.

import { chip, splitFiles } from "./attachments.js";
import { h } from "./dom.js";
import { markdown } from "./markdown.js";

/** An element for the text of a question. */
export function saidView(content) {
  const { words, files } = splitFiles(content);
  return h("div", { class: "said prose" }, markdown(words), files.length ? h("div", { class: "chips" }, files.map((file) => chip(file))) : null);
}
