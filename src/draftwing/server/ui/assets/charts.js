// Small charts of the engine's view.

import { h, s } from "./dom.js";

/** Lines over time, newest at the right; words as long as nothing has happened. series: [values, class] each, null where
 * nothing is known. */
export function lines(series, length, words, most = 0) {
  if (!series.some(([values]) => values.some((value) => value > 0))) {
    return h("p", { class: "chart none" }, "Nothing has run since this view was opened");
  }
  const top = Math.max(most, ...series.flatMap(([values]) => values.filter((value) => value != null))) || 1;
  const svg = s("svg", { class: "chart", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": words });
  series.forEach(([values, kind], at) => {
    const points = values.map((value, i) => (value == null ? null : [100 - ((values.length - 1 - i) * 100) / (length - 1), 39 - (value / top) * 36]));
    const known = points.filter(Boolean);
    if (known.length < 2) return;
    const path = known.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join(" L");
    if (!at) svg.append(s("path", { class: "area", d: `M${known[0][0]} 40 L${path} L${known.at(-1)[0]} 40Z` }));
    svg.append(s("path", { class: `line ${kind}`, d: `M${path}` }));
  });
  return svg;
}

/** A line over points of time [at, value], and marks [at, words] of what happened there. */
export function timeline(points, marks, words) {
  if (points.length < 2) return h("p", { class: "chart none" }, "Not enough requests have ended yet");
  const first = points[0][0], span = points.at(-1)[0] - first, top = Math.max(2, ...points.map(([, value]) => value));
  const x = (at) => (100 * (at - first)) / span;
  const path = points.map(([at, value]) => `${x(at).toFixed(2)} ${(39 - (value / top) * 36).toFixed(2)}`).join(" L");
  const svg = s("svg", { class: "chart", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": words },
    s("path", { class: "area", d: `M0 40 L${path} L100 40Z` }), s("path", { class: "line", d: `M${path}` }));
  for (const [at, name] of marks.filter(([at]) => at >= first)) {
    svg.append(s("path", { class: "line second", d: `M${x(at).toFixed(2)} 0 V40` }, s("title", {}, name)));
  }
  return svg;
}

/** Shares of a whole next to each other, and what they are. parts: [class, name, value, words]. */
export function shares(parts) {
  const bar = h("div", { class: "stack" });
  for (const [kind, name, value] of parts) {
    const part = h("i", { class: kind, title: name });
    part.style.flexGrow = value;
    bar.append(part);
  }
  return [bar, h("div", { class: "keys" }, parts.map(([kind, name, , words]) => h("span", {}, h("i", { class: kind }), `${name} ${words}`)))];
}

/** Columns of shares from 0 to 1, named 1, 2, ... */
export function columns(values, colour) {
  return h("div", { class: "depths" }, values.map((value, i) => {
    const column = h("i", { class: colour });
    column.style.height = `${Math.round(value * 72)}%`;
    return h("div", {}, h("b", {}, `${Math.round(value * 100)}%`), column, `${i + 1}`);
  }));
}
