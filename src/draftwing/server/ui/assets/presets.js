// System prompts with names: { name: text }, and which of them a new conversation begins with. Kept in localStorage.

import { byId, h } from "./dom.js";
import { askedText, notice } from "./overlays.js";

const NAME = "draftwing-presets";

export class Presets {
  /** changed: is called with the text that the open conversation takes. */
  constructor(changed) {
    this.changed = changed;
    this.field = byId("system");
    this.choice = h("select", { id: "preset" });
    this.standard = h("input", { type: "checkbox", id: "preset-default" });
    this.save = h("button", { type: "button" }, "Save as preset");
    this.remove = h("button", { type: "button" }, "Delete preset");
    this.field.after(h("div", { class: "prompts" }, h("label", { for: "preset" }, "Preset"), this.choice, this.save, this.remove,
      h("label", { class: "check" }, this.standard, "for new conversations")));
    this.choice.addEventListener("change", () => {
      this.field.value = this.kept.texts[this.choice.value] ?? "";
      this.changed(this.field.value);
      this.draw();
    });
    this.field.addEventListener("input", () => this.draw());
    this.save.addEventListener("click", () => this.add());
    this.remove.addEventListener("click", () => this.drop());
    this.standard.addEventListener("change", () => {
      this.write((kept) => { kept.standard = this.standard.checked ? this.choice.value : ""; });
    });
    addEventListener("storage", ({ key }) => { if (key === NAME) this.draw(); });
    this.draw();
  }

  /** What is kept, which another tab may have changed: { texts, standard }. */
  get kept() {
    let found = null;
    try {
      found = JSON.parse(localStorage.getItem(NAME));
    } catch {
      // nothing that this page wrote
    }
    const texts = Object.entries(found?.texts ?? {}).filter(([, text]) => typeof text === "string");
    return { texts: Object.fromEntries(texts), standard: typeof found?.standard === "string" ? found.standard : "" };
  }

  /** The system prompt of a new conversation. */
  get initial() {
    const { texts, standard } = this.kept;
    return texts[standard] ?? "";
  }

  write(change) {
    const { kept } = this;
    change(kept);
    try {
      localStorage.setItem(NAME, JSON.stringify(kept));
    } catch {
      notice("room", "This browser has no room for the preset.");
    }
    this.draw();
  }

  async add() {
    const name = await askedText("Save the system prompt", "Name of the preset", this.choice.value, "Save");
    if (name !== null) this.write((kept) => { kept.texts[name] = this.field.value.trim(); });
  }

  drop() {
    const name = this.choice.value;
    const { texts, standard } = this.kept;
    this.write((kept) => {
      delete kept.texts[name];
      if (standard === name) kept.standard = "";
    });
    notice("deleted", `Deleted the preset “${name}”.`, [["Undo", () => this.write((kept) => {
      kept.texts[name] = texts[name];
      kept.standard ||= standard;
    })]], true);
  }

  /** Shows the preset that the field's text is of. */
  draw() {
    const { texts, standard } = this.kept;
    const text = this.field.value.trim();
    const same = Object.keys(texts).filter((name) => texts[name] === text);
    const name = same.includes(this.choice.value) ? this.choice.value : same[0] ?? "";
    const names = Object.keys(texts).sort((a, b) => a.localeCompare(b));
    this.choice.replaceChildren(h("option", { value: "" }, text && !name ? "(changed)" : "(none)"),
      ...names.map((one) => h("option", { value: one }, one === standard ? `${one} (default)` : one)));
    this.choice.value = name;
    this.save.disabled = !text || Boolean(name);
    this.remove.disabled = this.standard.disabled = !name;
    this.standard.checked = Boolean(name) && name === standard;
  }
}
