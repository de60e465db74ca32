// Begins: asks the server what it is, then shows the view that the address names.

import { ask, choose } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h } from "./dom.js";
import { Drafts } from "./drafts.js";
import { Engine } from "./engine.js";
import { showModel } from "./model.js";
import { Models, chosenIn } from "./models.js";
import { notice } from "./overlays.js";
import { Store } from "./store.js";

async function begin() {
  let facts;
  try {
    facts = await ask("/ui/info");
  } catch (error) {
    byId("messages").replaceChildren(h("p", { class: "error", role: "alert" }, error.message, " ",
      h("button", { type: "button", onclick: () => begin() }, "Try again")));
    return;
  }
  const views = {};
  if (facts.models) {
    const name = chosenIn(location.search);
    const models = new Models(facts, name);
    facts = name && await loaded(name, facts.models).catch((error) => models.complain(error));
    views.models = models;
  }
  if (facts) {
    showModel(facts);
    document.title = `${facts.model} · draftwing`;
    const store = new Store((words) => {
      byId("kept").textContent = words;
      notice("room", words);
    });
    await store.load();
    const chat = new Chat(facts, store, new Drafts(facts));
    views.chat = { look: () => chat.shown() };
    views.engine = new Engine(facts);
  }
  const show = () => {
    const named = location.hash.slice(1);
    const view = Object.hasOwn(views, named) ? named : facts ? "chat" : "models";
    for (const link of document.querySelectorAll("[data-view]")) {
      const name = link.dataset.view;
      byId(name).toggleAttribute("data-shown", name === view);
      link.hidden = !views[name];
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    byId("state").textContent = "";
    delete byId("state").dataset.state;
    for (const [name, one] of Object.entries(views)) {
      if (name === view && (name === "chat" || !document.hidden)) one.look();
      else one.leave?.();
    }
  };
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", show); // nobody looks at a hidden page
  show();
}

/** Facts of one of several models, which is loaded if need be. */
async function loaded(name, models) {
  choose(name);
  if (models.find((one) => one.name === name)?.state !== "loaded") {
    byId("messages").replaceChildren(h("p", { role: "status" }, `${name} is being loaded.`));
    await ask("/api/generate", { model: name, stream: false }); // loads it, and generates nothing
  }
  return ask("/ui/info");
}

begin();
