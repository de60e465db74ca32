// Begins: asks the server what it is, then shows the view that the address names.

import { ask } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h } from "./dom.js";
import { Drafts } from "./drafts.js";
import { Engine } from "./engine.js";
import { showModel } from "./model.js";
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
  showModel(facts);
  document.title = `${facts.model} · draftwing`;
  const engine = new Engine(facts);
  const store = new Store((words) => {
    byId("kept").textContent = words;
    notice("room", words);
  });
  await store.load();
  const chat = new Chat(facts, store, new Drafts(facts));
  const show = () => {
    const view = location.hash === "#engine" ? "engine" : "chat";
    for (const name of ["chat", "engine"]) byId(name).toggleAttribute("data-shown", name === view);
    for (const link of document.querySelectorAll("[data-view]")) {
      if (link.dataset.view === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    byId("state").textContent = "";
    delete byId("state").dataset.state;
    if (view === "engine" && !document.hidden) engine.look();
    else engine.leave();
    if (view === "chat") chat.shown();
  };
  addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", show); // nobody looks at a hidden page
  show();
}

begin();
