// What is known of how an answer was drafted: its steps, figures over them, and files of them.

const FORMAT = "draftwing-trace", VERSION = 1;

export class Trace {
  constructor(drafts) {
    this.drafts = drafts; // whether the answer was asked for with drafts
    this.steps = []; // as the server sends them
    this.lost = 0; // steps that the server left out
    this.forwards = 0; // steps that verified; the first one of an answer is its prompt's
    this.tokens = 0; // of those
    this.drafted = false; // whether any of them had drafts
  }

  add(steps) {
    for (const step of steps) {
      const last = this.steps.at(-1);
      if (last && step.step > last.step + 1) this.lost += step.step - last.step - 1;
      this.steps.push(step);
      this.drafted ||= step.nodes.length > 0;
      if (step.step === 0) continue;
      this.forwards += 1;
      this.tokens += step.tokens.length;
    }
  }

  /** Tokens of each step on average. */
  get perStep() {
    return this.forwards ? this.tokens / this.forwards : 0;
  }

  /** Text of the tokens before a step. */
  before(at) {
    return this.steps.slice(Math.max(at - 12, 0), at).map(said).join("");
  }
}

const said = (step) => step.tokens.map((token) => token.text).join("");

/** Accepted drafts of a step, from the root down. */
export const acceptedOf = (step) => step.nodes.filter((node) => node.accepted);

/** Class of a draft's colour. */
export const classOf = (node) => `by-${node.by}`;

/** Token texts with their white space made visible. */
export function shown(text, most = 14) {
  const visible = text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (gap) => "·".repeat(gap.length));
  const characters = [...(visible || "∅")];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : characters.join("");
}

/** The text of a file with a trace. facts: of the server, where the trace is not of a file itself. */
export function traceFile(trace, facts) {
  const { version, model, algorithm, num_steps: depth, topk, num_draft_tokens: nodes, device, dtype } = facts;
  const source = trace.source ?? { draftwing: version, model, device, dtype, drafter: { algorithm, depth, topk, nodes } };
  const { drafts, lost, steps } = trace;
  return `${JSON.stringify({ format: FORMAT, version: VERSION, ...source, drafts, lost, steps })}\n`;
}

/** The trace in a file of this page, with `source`, where it comes from. Raises Error in words for anything else. */
export function readTrace(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is no JSON. Expected a trace that was saved here.");
  }
  if (file?.format !== FORMAT) throw new Error(`Expected a file with "format": "${FORMAT}".`);
  if (file.version !== VERSION) throw new Error(`Expected version ${VERSION} of the format, found ${JSON.stringify(file.version)}.`);
  const wrong = Array.isArray(file.steps) ? file.steps.findIndex((step) => !isStep(step)) : 0;
  if (wrong >= 0) throw new Error(`Entry ${wrong} of "steps" is no step as docs/page.md describes it.`);
  if (!file.steps.length) throw new Error("There is no step in this file.");
  const trace = new Trace(file.drafts !== false);
  trace.add(file.steps);
  const { draftwing, model, device, dtype, drafter } = file;
  trace.source = { draftwing, model, device, dtype, drafter };
  return trace;
}

/** Where a trace of a file comes from, in words. */
export function sourceOf({ draftwing, model, drafter }) {
  const known = (one) => typeof one === "string" && one;
  return [model, drafter?.algorithm, known(draftwing) && `draftwing ${draftwing}`].filter(known).join(" · ");
}

const isToken = (one) => typeof one?.text === "string";
const SOURCES = ["model", "lookup", "both", "other"];
const areImages = (images) => images === undefined || (Array.isArray(images) && images.every((tokens) => Number.isInteger(tokens) && tokens > 0));

function isStep(step) {
  const node = (one, i) => isToken(one) && SOURCES.includes(one.by) && typeof one.survival === "number"
    && (one.parent === null || (Number.isInteger(one.parent) && one.parent >= 0 && one.parent < i));
  return Number.isInteger(step?.step) && typeof step.seconds === "number" && Array.isArray(step.tokens) && step.tokens.length > 0
    && areImages(step.images) && step.tokens.every(isToken) && Array.isArray(step.nodes) && step.nodes.every(node);
}
