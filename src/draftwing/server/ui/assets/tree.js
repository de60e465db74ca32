// Draws the tree of one step: depth runs to the right, the accepted path is a thick straight line on top.

import { s } from "./dom.js";
import { acceptedOf, classOf, shown } from "./trace.js";

const ROW = 31, BOX = 23, GAP = 30, LETTER = 7.6, PAD = 9, EDGE = 14, HEAD = 22;

const SMALLEST = 0.66; // scale at which its letters can still be read

/** An SVG of a step. before: text that ends with the root's token. room: pixels across; a wide tree is drawn smaller. */
export function drawTree(step, before, room) {
  const places = layout(step, before);
  const width = Math.max(...places.map((place) => place.x + place.width)) + EDGE;
  const height = HEAD + (Math.max(...places.map((place) => place.row)) + 1) * ROW + 6;
  const scale = Math.min(1, Math.max(room / width, SMALLEST));
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale, role: "img", "aria-label": inWords(step),
  });
  const depths = Math.max(...places.map((place) => place.depth));
  for (let depth = 1; depth <= depths; depth += 1) {
    const first = places.find((place) => place.depth === depth);
    svg.append(s("text", { class: "depth", x: first.x, y: 14 }, depth === 1 ? "depth 1" : depth));
  }
  svg.append(...places.filter((place) => place.above).map(edge), ...places.map(box));
  return svg;
}

/** A step in one sentence. */
export function inWords(step) {
  const drafted = step.nodes.length, accepted = acceptedOf(step).length;
  if (!drafted) return `No drafts: one forward pass, ${plural(step.tokens.length, "token")}.`;
  return `${drafted} drafted, ${accepted || "none"} accepted: one forward pass, ${plural(step.tokens.length, "token")}.`;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function layout(step, before) {
  const root = { text: context(before), depth: 0, kind: "root", below: [] };
  const nodes = step.nodes.map((node) => ({
    text: shown(node.text), node, special: node.special,
    kind: node.accepted ? "accepted" : node.verified ? "rejected" : "rejected unverified",
    sure: node.accepted ? 1 : node.survival, below: [],
  }));
  nodes.forEach((place) => {
    place.above = place.node.parent === null ? root : nodes[place.node.parent];
    place.depth = place.above.depth + 1;
    place.above.below.push(place);
  });
  const last = nodes.findLast((place) => place.kind === "accepted") ?? root;
  const own = step.tokens[acceptedOf(step).length];
  if (own) {
    const place = { text: shown(own.text), special: own.special, depth: last.depth + 1, kind: "own", sure: 1, above: last, below: [] };
    last.below.push(place);
    nodes.push(place);
  }
  rows(root);
  return columns([root, ...nodes]);
}

/** What comes first stands highest: the accepted path, then by how likely a draft was. */
function rows(root) {
  const rank = { accepted: 0, own: 0, rejected: 1, "rejected unverified": 1 };
  let next = 0;
  const visit = (place) => {
    place.below.sort((a, b) => rank[a.kind] - rank[b.kind] || b.sure - a.sure);
    place.row = next;
    place.below.forEach((child, i) => {
      if (i) next += 1;
      visit(child);
    });
  };
  visit(root);
}

function columns(places) {
  const widths = [];
  for (const place of places) {
    place.width = Math.max([...place.text].length * LETTER + 2 * PAD, BOX);
    widths[place.depth] = Math.max(widths[place.depth] ?? 0, place.width);
  }
  const starts = [EDGE];
  widths.forEach((width, depth) => { starts[depth + 1] = starts[depth] + width + GAP; });
  for (const place of places) {
    place.x = starts[place.depth];
    place.y = HEAD + place.row * ROW;
  }
  return places;
}

function context(before) {
  const text = before.replace(/\s+/g, " ").trimStart();
  return text.length > 16 ? `…${text.slice(-15)}` : text || "start";
}

const colour = (place) => (place.kind === "own" ? "by-own" : classOf(place.node));
const motion = (place) => ({ "data-grows": true, "--at": place.depth, "--how-sure": place.sure ?? 1 });

function edge(place) {
  const above = place.above;
  const x1 = above.x + above.width, y1 = above.y + BOX / 2, x2 = place.x, y2 = place.y + BOX / 2;
  const middle = (x2 - GAP / 2 + Math.max(x1, x2 - GAP)) / 2;
  const taken = place.kind === "accepted" || place.kind === "own" ? "taken" : "";
  const guess = place.kind.includes("unverified") ? "unverified" : "";
  const bend = y1 === y2 ? `L${x2} ${y2}` : `L${x2 - GAP} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return s("path", { class: `${colour(place)} ${taken} ${guess}`, d: `M${x1} ${y1} ${bend}`, ...motion(place) });
}

function box(place) {
  const own = place.kind === "root" ? "" : colour(place);
  const grows = place.kind === "root" ? {} : motion(place);
  return s("g", { class: `${place.kind} ${own}${place.special ? " special" : ""}`, ...grows },
    s("title", {}, about(place)),
    s("rect", { class: "node", x: place.x, y: place.y, width: place.width, height: BOX, rx: 7 }),
    s("text", { class: place.kind === "root" ? "context" : "", x: place.x + PAD, y: place.y + 16 }, place.text));
}

function about(place) {
  if (place.kind === "root") return "The text so far";
  if (place.kind === "own") return place.special ? "The model's own next token, a special one" : "The model's own next token";
  const { by, survival, verified, accepted } = place.node;
  const fate = accepted ? "accepted" : verified ? "rejected: the model writes something else" : "not verified: too unlikely";
  return `${JSON.stringify(place.node.text)}${place.special ? ", a special token," : ""} by ${by}: ${Math.round(survival * 100)}% expected, ${fate}`;
}
