// Keys of the page: those that no browser has a use for, and a dialog that names them.

import { h } from "./dom.js";
import { shown } from "./overlays.js";

const GIVEN = [
  ["Enter", "send the question"],
  ["Shift+Enter", "new line"],
  ["Escape", "stop the answer; leave a form, a menu or the search"],
  ["Ctrl+Enter", "save an answer that you edit"],
];

/** Listens for shortcuts: lists of key (as `KeyboardEvent.code` has it), its name, what it does in words, and a function.
 * All but the help's are pressed with Alt and Shift. Returns what shows the help. */
export function shortcuts(known) {
  const help = () => {
    if (document.querySelector("dialog[open]")) return;
    const rows = [...GIVEN, ...known.map(([, name, words]) => [`Alt+Shift+${name}`, words]), ["Ctrl+/", "this list"]];
    const box = h("dialog", { "aria-labelledby": "help-title" }, h("h2", { id: "help-title" }, "Keyboard shortcuts"),
      h("dl", { class: "keys" }, rows.map(([keys, words]) => h("div", {},
        h("dt", {}, keys.split("+").map((key) => h("kbd", {}, key))), h("dd", {}, words)))),
      h("form", { method: "dialog", class: "row-end" }, h("button", { class: "send" }, "Close")));
    shown(box);
  };
  addEventListener("keydown", (event) => {
    const { altKey, shiftKey, ctrlKey, metaKey, key, code } = event;
    const helps = (ctrlKey || metaKey) && !altKey && key === "/";
    const found = altKey && shiftKey && !ctrlKey && !metaKey && known.find(([one]) => one === code);
    if ((!helps && !found) || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    if (helps) help();
    else found[3]();
  });
  return help;
}
