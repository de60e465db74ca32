// Formulas: where one begins and ends in a text, and its MathML, by Temml, which is loaded with the first of them.

import { h } from "./dom.js";

const LIMIT = 4000; // characters of a formula
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false]];
// trust: false, no links and no classes; the rest bounds what a formula may cost and cover.
const HOW = { throwOnError: true, trust: false, maxExpand: 300, maxSize: [5, 40] };

/** The formula at the beginning of a text, as a token; undefined where there is none. */
export function takeFormula(text) {
  for (const [open, close, display] of PAIRS) {
    if (!text.startsWith(open)) continue;
    const end = text.slice(0, LIMIT).indexOf(close, open.length + 1);
    const tex = text.slice(open.length, end);
    return end < 0 || !tex.trim() || tex.includes("\n\n") ? undefined : { type: "math", raw: text.slice(0, end + close.length), tex, display };
  }
  if (text[0] !== "$") return undefined;
  const found = /^\$(?![\s$])((?:\\[^\n]|[^\\$\n]){1,400}?)(?<!\s)\$(?![\d$])/.exec(text.slice(0, 402)); // $5 and $10 are none
  return found ? { type: "math", raw: found[0], tex: found[1], display: false } : undefined;
}

let loading = null;

function temml() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/ui/assets/vendor/temml.js", onload: () => resolve(globalThis.temml), onerror: reject });
    document.head.append(script);
  }).catch(() => { loading = null; return null; });
  return loading;
}

/** An element with a formula; its source until it is drawn, and where it is no TeX. */
export function formula(tex, display, raw) {
  const element = h(display ? "div" : "span", display ? { class: "math display", tabindex: "0", role: "group", "aria-label": "Formula" } : { class: "math" }, raw.trim());
  const draw = (library) => {
    try {
      const made = h("span");
      library.render(tex, made, { ...HOW, displayMode: display });
      element.replaceChildren(...made.childNodes);
    } catch {
      element.classList.add("raw");
    }
  };
  if (globalThis.temml) draw(globalThis.temml);
  else temml().then((library) => library && draw(library));
  return element;
}
