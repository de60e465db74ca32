// A question as it is shown: its words as markdown, its files as chips.

import { chip, splitFiles } from "./attachments.js";
import { h } from "./dom.js";
import { markdown } from "./markdown.js";
import { picturesOf, thumbnail } from "./pictures.js";

/** An element for a question: its pictures, and its text. */
export function saidView(message) {
  const { words, files } = splitFiles(message.content);
  const pictures = picturesOf(message).map((one) => thumbnail(one));
  return h("div", { class: "said prose" }, pictures.length ? h("div", { class: "chips" }, pictures) : null, markdown(words), files.length ? h("div", { class: "chips" }, files.map((file) => chip(file))) : null);
}
