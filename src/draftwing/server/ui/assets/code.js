// A block of code, with colours by highlight.js, whose languages are loaded as they are needed.

import { copyButton, h } from "./dom.js";

const AT_ONCE = 8000; // characters that are coloured anew while they grow
const MOST = 200000; // characters that are coloured at all
const ALIASES = {
  "c++": "cpp", cc: "cpp", cs: "csharp", "c#": "csharp", docker: "dockerfile", golang: "go", h: "c", hpp: "cpp", html: "xml",
  js: "javascript", jsonc: "json", jsx: "javascript", kt: "kotlin", make: "makefile", md: "markdown", mjs: "javascript",
  patch: "diff", py: "python", python3: "python", rb: "ruby", rs: "rust", sh: "bash", svg: "xml", toml: "ini", ts: "typescript",
  tsx: "typescript", yml: "yaml", zsh: "bash", console: "shell",
};
const LANGUAGES = new Set(("bash c cpp csharp css diff dockerfile go ini java javascript json kotlin makefile markdown php "
  + "python ruby rust shell sql swift typescript xml yaml").split(" "));
const PARTS = { xml: ["css", "javascript"], markdown: ["xml"], php: ["xml"], shell: ["bash"] }; // that others may hold

/** Makes elements of what highlight.js finds, instead of HTML. */
class Elements {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }

  addText(text) { if (text) this.open.at(-1).append(text); }

  openNode(name) {
    const part = h("span", { class: `hl-${name.split(/[.:]/)[0]}` });
    this.open.at(-1).append(part);
    this.open.push(part);
  }

  closeNode() { if (this.open.length > 1) this.open.pop(); }

  startScope(name) { this.openNode(name); }

  endScope() { this.closeNode(); }

  __addSublanguage(other) { this.open.at(-1).append(other.root); }

  toHTML() { return ""; }

  finalize() {}
}

let core = null;
const loaded = new Map(); // promises, by language

/** Loads a language; highlight.js with it, or null where it cannot be had. */
function highlighter(language) {
  if (!loaded.has(language)) loaded.set(language, load(language).catch(() => { loaded.delete(language); return null; }));
  return loaded.get(language);
}

async function load(language) {
  core ??= import("./vendor/highlight/core.js").then(({ default: found }) => {
    found.configure({ __emitter: Elements });
    return found;
  });
  const library = await core;
  for (const one of [language, ...(PARTS[language] ?? [])]) {
    if (!library.getLanguage(one)) library.registerLanguage(one, (await import(`./vendor/highlight/${one}.js`)).default);
  }
  return library;
}

/** The name of a language's grammar; null for one that there is none of. */
export function grammarOf(words) {
  const name = words.toLowerCase();
  const known = Object.hasOwn(ALIASES, name) ? ALIASES[name] : name;
  return LANGUAGES.has(known) ? known : null;
}

export class CodeBlock {
  constructor(text, words) {
    this.text = text;
    this.language = grammarOf(words);
    this.library = null;
    this.body = h("code", {}, text);
    this.element = h("div", { class: "code" },
      h("div", { class: "code-head" }, h("span", {}, words), copyButton(() => this.text)),
      h("pre", { tabindex: "0", role: "group", "aria-label": words ? `Code, ${words}` : "Code" }, this.body));
    if (this.language) highlighter(this.language).then((library) => { this.library = library; this.colour(); });
  }

  /** The code is longer now. */
  grow(text) {
    const more = text.slice(this.text.length);
    this.text = text;
    if (this.library && text.length <= AT_ONCE) this.colour();
    else this.body.append(more);
  }

  colour() {
    if (!this.library || this.text.length > MOST) return;
    const { _emitter: found } = this.library.highlight(this.text, { language: this.language, ignoreIllegals: true });
    if (found.root.textContent === this.text) this.body.replaceChildren(found.root);
  }
}
