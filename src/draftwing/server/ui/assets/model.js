// What is served, and on what: a line in the header, and all of it in a dialog.

import { byId, h, number } from "./dom.js";

const SETS = { avx2: "AVX2", avx_vnni: "AVX-VNNI", avx512: "AVX-512", avx512_bf16: "AVX-512", dotprod: "NEON" };

export function showModel(facts) {
  const warning = facts.simulated ? ` · simulated: ${facts.simulated.join(", ")}` : "";
  byId("facts").replaceChildren(h("b", {}, facts.model), ` · ${weightsOf(facts)}, ${deviceOf(facts)} · ${drafterOf(facts)}${warning}`);
  byId("facts").hidden = false;
  byId("facts").title = "About the model and the server";
  byId("facts").addEventListener("click", () => byId("model-dialog").showModal());
  byId("model-facts").append(...rows(facts).filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** The type that most of the weights are stored in. */
export function weightsOf({ weight_bytes: sizes, dtype }) {
  const [first] = Object.entries(sizes ?? {}).sort(([, a], [, b]) => b - a);
  return first ? first[0] : dtype;
}

/** The device in few words: a GPU's name, or the instructions of the CPU that kernels were built for. */
export function deviceOf({ device, device_names: names, kernels }) {
  if (device !== "cpu") return several(names) || device.toUpperCase();
  const set = SETS[/C for (\w+)/.exec(kernels ?? "")?.[1]];
  return set ? `CPU (${set})` : "CPU";
}

function several(names = []) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join(", ");
}

const drafterOf = ({ algorithm }) => (algorithm === "none" ? "no speculation" : `drafts by ${algorithm}`);

function rows(facts) {
  const { algorithm, num_steps: depth, topk, num_draft_tokens: nodes } = facts;
  const weights = Object.entries(facts.weight_bytes ?? {}).sort(([, a], [, b]) => b - a);
  return [
    ["Model", facts.model],
    ["Loaded from", facts.model_path === facts.model ? "" : facts.model_path],
    ["Architecture", facts.architecture],
    ["Weights", weights.map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ")],
    ["Activations", facts.device === "cpu" && /^Q\d/.test(weights[0]?.[0]) ? `${facts.dtype}, in products with weights 8 bits` : facts.dtype],
    ["Context", `${number(facts.context_length)} tokens`],
    ["KV cache", `${number(facts.max_total_tokens)} tokens for all requests together`],
    ["Drafter", algorithm === "none" ? "no speculation: every step gives one token" : algorithm],
    ["Draft model", facts.draft_model_path],
    ["Largest draft tree", algorithm === "none" ? "" : `depth ${depth}, top-k ${topk}, ${nodes} tokens`],
    ["Device", [deviceOf(facts), facts.device === "cpu" ? several(facts.device_names) : ""].filter(Boolean).join(", ")],
    ["Kernels", facts.kernels],
    ["Version", `draftwing ${facts.version}`],
  ];
}

function bytes(size) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const unit = size < 1000 ? 0 : Math.min(Math.floor(Math.log10(size) / 3), units.length - 1);
  return `${number(size / 1000 ** unit, unit > 2 ? 1 : 0)} ${units[unit]}`;
}
