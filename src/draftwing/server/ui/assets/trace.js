// What is known of how an answer was drafted: its steps, and figures over them.

export class Trace {
  constructor(drafts) {
    this.drafts = drafts; // whether the answer was asked for with drafts
    this.steps = []; // as the server tells them
    this.lost = 0; // steps that the server left out
  }

  add(steps) {
    for (const step of steps) {
      const last = this.steps.at(-1);
      if (last && step.step > last.step + 1) this.lost += step.step - last.step - 1;
      this.steps.push(step);
    }
  }

  /** Steps that verified; the first one of an answer is its prompt's. */
  get decoding() {
    return this.steps.filter((step) => step.step > 0);
  }

  get tokens() {
    return this.decoding.reduce((sum, step) => sum + step.tokens.length, 0);
  }

  /** Tokens of each step on average. */
  get perStep() {
    const steps = this.decoding;
    return steps.length ? this.tokens / steps.length : 0;
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
