// The models of a server that has several: which are there, what they do, and a choice.

import { ask } from "./api.js";
import { byId, h, number } from "./dom.js";

const AGAIN = 2000; // milliseconds between two looks
const STATES = { unloaded: "not loaded", loading: "loading", loaded: "loaded", sleeping: "sleeping", unloading: "unloading" };

/** The model that the page's address names; null where it names none. */
export const chosenIn = (search) => new URLSearchParams(search).get("model") || null;

/** The address of the page with a model. */
export const pageOf = (name) => `?${new URLSearchParams({ model: name })}#chat`;

export class Models {
  /** chosen: the name of the model that the page talks to. */
  constructor(found, chosen) {
    this.chosen = chosen;
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.list = h("div", {});
    this.drawn = "";
    byId("models").append(h("div", { class: "cards" },
      h("section", { class: "card all" }, h("h2", {}, "Models of this server"), this.error, this.list)));
    this.take(found);
  }

  /** Looks as long as it is asked to. */
  async look() {
    if (this.stopper) return;
    const { signal } = (this.stopper = new AbortController());
    let lost = false; // the server does not answer
    while (!signal.aborted) {
      try {
        this.take(await ask("/ui/info", undefined, signal, false));
        if (lost) this.error.hidden = true;
        lost = false;
      } catch (error) {
        if (signal.aborted) return;
        lost = true;
        this.complain(error);
      }
      await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
    }
  }

  leave() {
    this.stopper?.abort();
    this.stopper = null;
  }

  take(found) {
    const text = JSON.stringify(found);
    if (text === this.drawn) return; // whoever is at a button with the keyboard stays there
    this.drawn = text;
    this.list.replaceChildren(...table(found, this.chosen, (action, name) => this.act(action, name)));
  }

  async act(action, name) {
    this.error.hidden = true;
    try {
      await ask(`/models/${action}`, { model: name }, undefined, false);
    } catch (error) {
      this.complain(error);
    }
    this.take(await ask("/ui/info", undefined, undefined, false).catch(() => JSON.parse(this.drawn)));
  }

  complain(error) {
    this.error.textContent = error.message;
    this.error.hidden = false;
  }
}

/** What stands in the view. act: is called with load or unload and a name. */
export function table({ models, memory }, chosen, act) {
  if (!models.length) return [h("p", { class: "nothing" }, "There are none yet: put some into the folder of the server, or fetch one with draftwing pull.")];
  const taken = models.reduce((sum, one) => sum + one.memory, 0);
  const room = memory.budget ? `of ${gigabytes(memory.budget)} that they may take` : memory.free == null ? "" : `${gigabytes(memory.free)} are free`;
  return [
    h("p", { class: "sub" }, [`Loaded models take ${gigabytes(taken)}`, room].filter(Boolean).join(memory.budget ? " " : "; ")),
    h("div", { class: "scrolls" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Model", "State", "Requests", "Files", "Memory", ""].map((name, at) => h("th", { class: at > 1 && at < 5 ? "n" : null }, name)))),
      h("tbody", {}, models.map((one) => row(one, one.name === chosen, act))))),
  ];
}

function row(one, chosen, act) {
  const on = ["loaded", "sleeping", "unloading"].includes(one.state);
  const action = on ? "unload" : "load";
  const state = one.failure && one.state === "unloaded" ? `not loaded: ${one.failure}` : STATES[one.state];
  return h("tr", { "data-chosen": chosen },
    h("td", {}, h("a", { href: pageOf(one.name), "aria-current": chosen ? "true" : null }, one.name)),
    h("td", { "data-state": one.state }, state),
    h("td", { class: "n" }, one.waiting ? `${one.requests} + ${one.waiting} waiting` : number(one.requests)),
    h("td", { class: "n" }, one.files ? gigabytes(one.files) : "–"),
    h("td", { class: "n" }, one.memory ? `${gigabytes(one.memory)} of ${gigabytes(one.at_most)}` : "–"),
    h("td", { class: "n" }, h("button", {
      type: "button", disabled: one.state === "loading" || one.state === "unloading",
      "aria-label": `${on ? "Unload" : "Load"} ${one.name}`, onclick: () => act(action, one.name),
    }, on ? "Unload" : "Load")));
}

const gigabytes = (size) => `${number(size / 1e9, 2)} GB`;
