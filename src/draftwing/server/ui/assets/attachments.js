// Text files and pictures that go along with a question: chosen, pasted, or dropped. Texts become a part of the question's
// text, so that what is kept, exported and edited is what was asked; pictures stay beside it.

import { chooseFile } from "./files.js";
import { byId, h, number } from "./dom.js";
import { isPicture, readPicture, thumbnail } from "./pictures.js";

export const LIMIT = 256 * 1024; // bytes of a file
const HEAD = /^File: ([^\n]+)\n(`{3,})([^\n`]*)\n/;

/** A question with files: its words, then each file as a block of code below its name. */
export function withFiles(words, files) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File: ${name.replace(/\n/g, " ")}\n${fence}${endingOf(name)}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [words, ...parts].filter(Boolean).join("\n\n");
}

/** What `withFiles` made a text of: { words, files }. */
export function splitFiles(content) {
  for (const found of content.matchAll(/(?:^|\n\n)(?=File: [^\n]+\n`{3})/g)) {
    const start = found.index + found[0].length;
    const files = takeAll(content.slice(start));
    if (files) return { words: content.slice(0, start).trimEnd(), files };
  }
  return { words: content, files: [] };
}

/** All of a text as files, or null. */
function takeAll(text) {
  const files = [];
  let rest = text;
  while (rest) {
    const file = takeFile(rest);
    if (!file) return null;
    files.push({ name: file.name, text: file.text });
    rest = rest.slice(file.length).replace(/^\n\n(?=File: )/, "");
  }
  return files;
}

function takeFile(text) {
  const head = HEAD.exec(text);
  if (!head) return null;
  const [whole, name, fence] = head;
  const end = text.indexOf(`\n${fence}`, whole.length - 1);
  if (end < 0) return null;
  const length = end + 1 + fence.length;
  if (length < text.length && !text.startsWith("\n\nFile: ", length)) return null;
  return { name, text: text.slice(whole.length, end + 1), length };
}

const endingOf = (name) => /\.([a-z0-9]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "";

/** A file as text. Raises Error in words for what is none, or too large. */
export async function readText(file) {
  if (file.size > LIMIT) throw new Error(`${file.name} has ${number(file.size / 1024)} KiB; the limit is ${number(LIMIT / 1024)} KiB.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no text in UTF-8. Text files alone can be attached.`);
  }
  if (/[\u0000-\u0008\u000e-\u001a]/.test(text)) throw new Error(`${file.name} is no text file.`);
  return text.replace(/\r\n?/g, "\n");
}

/** A chip with a file's name, which shows its text. more: further elements. */
export function chip({ name, text }, ...more) {
  const lines = text.split("\n").length - (text.endsWith("\n") ? 1 : 0);
  return h("details", { class: "chip" }, h("summary", {}, name, h("small", {}, `${number(lines)} ${lines === 1 ? "line" : "lines"}`)),
    h("pre", { tabindex: "0", role: "group", "aria-label": name }, text), more);
}

export class Attachments {
  /** sees: whether the model reads images. */
  constructor(sees) {
    this.sees = sees;
    this.files = [];
    this.images = [];
    this.chips = h("div", { class: "chips", hidden: true });
    this.problem = h("p", { class: "error note", role: "alert", hidden: true });
    const button = h("button", { type: "button", class: "quiet attach", "aria-label": sees ? "Attach text files and pictures" : "Attach text files", title: `Attach text files, up to ${LIMIT / 1024} KiB each${sees ? ", and pictures" : ""}`,
      onclick: () => chooseFile("", (file) => this.add([file]), true) }, "+");
    const ask = document.querySelector(".ask");
    ask.prepend(button);
    ask.before(this.chips, this.problem);
    byId("question").addEventListener("paste", (event) => this.given(event, event.clipboardData));
    const talk = document.querySelector(".talk");
    talk.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      talk.toggleAttribute("data-drop", true);
    });
    talk.addEventListener("dragleave", (event) => { if (!talk.contains(event.relatedTarget)) talk.removeAttribute("data-drop"); });
    talk.addEventListener("drop", (event) => {
      talk.removeAttribute("data-drop");
      this.given(event, event.dataTransfer);
    });
  }

  given(event, data) {
    if (!data.files.length) return; // text, which the browser pastes itself
    event.preventDefault();
    this.add([...data.files]);
  }

  async add(files) {
    const problems = [];
    for (const file of files) {
      try {
        if (isPicture(file)) this.images.push(await readPicture(file, this.sees));
        else this.files.push({ name: file.name, text: await readText(file) });
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.draw(problems.join(" "));
    byId("question").focus();
  }

  draw(problem = "") {
    this.chips.hidden = this.empty;
    const row = (one, view) => h("div", { class: "chip-row" }, view,
      h("button", { type: "button", class: "quiet", "aria-label": `Remove ${one.name}`, onclick: () => this.remove(one) }, "×"));
    this.chips.replaceChildren(...this.images.map((one) => row(one, thumbnail(one))), ...this.files.map((one) => row(one, chip(one))));
    this.problem.textContent = problem;
    this.problem.hidden = !problem;
  }

  remove(file) {
    this.files = this.files.filter((one) => one !== file);
    this.images = this.images.filter((one) => one !== file);
    this.draw();
    byId("question").focus();
  }

  get empty() {
    return !this.files.length && !this.images.length;
  }

  /** The question with the files, and its pictures, which are then forgotten: { content, images }. */
  take(words) {
    const { images } = this;
    const content = withFiles(words, this.files);
    this.files = [];
    this.images = [];
    this.draw();
    return { content, images };
  }

  /** Takes the files of a question back; returns its words. */
  restore(content) {
    const { words, files } = splitFiles(content);
    this.files = files;
    this.draw();
    return words;
  }
}
