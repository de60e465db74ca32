// What comes up over the conversation or above it: questions, menus, and notices.

import { byId, h } from "./dom.js";

const PASSES = 20_000; // milliseconds that a notice stays which is not waited for

/** Asks in a dialog. Resolves to what `value` gives once `action` was pressed, else to null. */
export function asked(title, content, action, value = () => true) {
  const box = h("dialog", { "aria-labelledby": "asked-title" }, h("h2", { id: "asked-title" }, title),
    h("form", { method: "dialog" }, content, h("div", { class: "row-end" },
      h("button", { type: "button", class: "quiet", onclick: () => box.close() }, "Cancel"),
      h("button", { class: "send", value: "yes" }, action))));
  return shown(box).then((pressed) => (pressed === "yes" ? value() : null));
}

/** Shows a dialog until it is closed. Resolves to what closed it. */
export function shown(box) {
  document.body.append(box);
  box.showModal();
  return new Promise((resolve) => {
    box.addEventListener("close", () => {
      box.remove(); // the browser gives the focus back
      resolve(box.returnValue);
    });
  });
}

/** Asks for a line of text; null if nothing was given. */
export async function askedText(title, label, text, action) {
  const field = h("input", { id: "asked-text", value: text, autocomplete: "off", required: true });
  setTimeout(() => field.select());
  const given = await asked(title, [h("label", { for: "asked-text" }, label), field], action, () => field.value.trim());
  return given || null;
}

/** A button with a list of actions below it: pairs of words and what to do, made when it is opened. */
export function menu(label, words, actions, kind = "") {
  const button = h("button", { type: "button", class: "quiet", "aria-label": words, title: words, "aria-expanded": "false" }, label);
  const list = h("ul", { hidden: true });
  const element = h("div", { class: `menu ${kind}` }, button, list);
  const show = (is) => {
    list.hidden = !is;
    button.setAttribute("aria-expanded", is);
    if (!is) return;
    list.replaceChildren(...actions().map(([name, what]) => {
      return h("li", {}, h("button", { type: "button", onclick: () => { show(false); button.focus(); what(); } }, name));
    }));
    list.querySelector("button").focus();
  };
  button.addEventListener("click", () => show(list.hidden));
  element.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !element.contains(event.relatedTarget)) show(false);
  });
  addEventListener("pointerdown", (event) => {
    if (!list.hidden && !element.contains(event.target)) show(false);
  });
  element.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    const items = [...list.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) items.at((items.indexOf(document.activeElement) + step + items.length) % items.length).focus();
    else if (event.key === "Escape") { show(false); button.focus(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return element;
}

/** A line above both views, with a button for each pair of `actions`. One with the same `name` is replaced.
 * passes: it goes by itself after a while. Returns what takes it away. */
export function notice(name, words, actions = [], passes = false) {
  const end = () => {
    const held = element.contains(document.activeElement);
    element.remove();
    if (held) byId("question").focus();
  };
  const pass = () => (element.matches(":hover, :focus-within") ? setTimeout(pass, PASSES) : end());
  const button = (label, what, more = {}) => h("button", { type: "button", class: "quiet", onclick: () => { end(); what(); }, ...more }, label);
  const element = h("div", { class: "notice", "data-name": name }, h("p", {}, words), actions.map(([label, what]) => button(label, what)),
    button("×", () => {}, { "aria-label": "Close this notice" }));
  document.querySelectorAll(".notice").forEach((one) => { if (one.dataset.name === name) one.remove(); });
  byId("notices").append(element);
  if (passes) setTimeout(pass, PASSES);
  return end;
}
