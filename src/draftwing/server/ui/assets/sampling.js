// What may be asked with the question: fields of a request, as they are typed, checked and sent. No elements here.

export const NUMBERS = [
  // Field of the request, words, lowest, highest, whole numbers alone, words where nothing is asked.
  ["temperature", "Temperature", 0, 10],
  ["top_p", "Top-p", 0, 1],
  ["top_k", "Top-k", -1, 1e9, true, "off"],
  ["min_p", "Min-p", 0, 1],
  ["repetition_penalty", "Repetition penalty", 0.01, 2],
  ["presence_penalty", "Presence penalty", -2, 2],
  ["frequency_penalty", "Frequency penalty", -2, 2],
  ["max_tokens", "Maximum tokens", 1, 1e9, true, "no limit"],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, true, "random"],
].map(([name, words, min, max, whole = false, otherwise = ""]) => ({ name, words, min, max, whole, otherwise }));
export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"];
const MOST_STOPS = 64;
const OWN = ["messages", "stream", "stream_options"]; // fields that the page fills by itself

/** Names of all settings that are kept. */
export const NAMES = [...NUMBERS.map(({ name }) => name), "stop", "schema", "reasoning_effort", "logprobs", "extra"];

/** Settings that go together; what they do not name is what the server does. */
export const PRESETS = {
  Precise: { temperature: "0" },
  Creative: { temperature: "1", min_p: "0.05" },
};

/** What the server does where a number is not given, in words. defaults: the server's. */
export function standard({ name, otherwise }, defaults) {
  const value = defaults[name];
  return value == null || (name === "top_k" && value < 1) ? otherwise : String(value);
}

/** What a setting means for a request: { fields } of it, or { problem } in words. typed: text, "" for nothing. */
export function read(name, typed) {
  const text = String(typed ?? "");
  if (!text.trim()) return { fields: {} };
  const number = NUMBERS.find((one) => one.name === name);
  if (number) return readNumber(number, text.trim());
  if (name === "stop") return readStops(text);
  if (name === "schema") return readSchema(text);
  if (name === "extra") return readExtra(text);
  if (name === "reasoning_effort") return { fields: { reasoning_effort: text } };
  if (name === "logprobs") return { fields: { logprobs: true, top_logprobs: 5 } };
  return { fields: {} };
}

function readNumber({ name, words, min, max, whole }, text) {
  const value = Number(text);
  const kind = whole ? "a whole number" : "a number";
  const range = max >= 1e9 ? `from ${min} on` : `from ${min} to ${max}`;
  const fits = text !== "" && Number.isFinite(value) && value >= min && value <= max && (!whole || Number.isInteger(value));
  const beginsAbove = name === "top_p" && value === 0; // the server wants some probability
  if (!fits || beginsAbove) return { problem: `${words}: expected ${kind} ${name === "top_p" ? "above 0, at most 1" : range}.` };
  return { fields: { [name]: value } };
}

function readStops(text) {
  const stops = text.split("\n").filter(Boolean).map((line) => line.replace(/\\([nt\\])/g, (_, sign) => ({ n: "\n", t: "\t", "\\": "\\" })[sign]));
  if (stops.length > MOST_STOPS) return { problem: `Stop strings: at most ${MOST_STOPS}.` };
  return { fields: { stop: stops } };
}

function readSchema(text) {
  const problem = jsonProblem(text);
  if (problem) return { problem: `JSON schema: ${problem}` };
  const schema = JSON.parse(text);
  if (!plain(schema)) return { problem: "JSON schema: expected an object, {...}." };
  return { fields: { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } } } };
}

function readExtra(text) {
  const problem = jsonProblem(text);
  if (problem) return { problem: `Request fields: ${problem}` };
  const fields = JSON.parse(text);
  if (!plain(fields)) return { problem: "Request fields: expected an object, {...}." };
  const own = OWN.find((name) => name in fields);
  return own ? { problem: `Request fields: "${own}" is what the page sends by itself.` } : { fields };
}

const plain = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Fields of a request of all settings that are right. names: of those that are offered. */
export function requestFields(settings, names = NAMES) {
  return Object.assign({}, ...names.map((name) => read(name, settings[name]).fields));
}

/** Where a JSON text is wrong, in words with line and column; null where it is right. */
export function jsonProblem(text) {
  try {
    JSON.parse(text);
    return null;
  } catch {
    const { at, wanted } = fault(text); // browsers say the place each in its own way, or not at all
    const before = text.slice(0, at).split("\n");
    const found = at < text.length ? JSON.stringify(text[at]) : "the end";
    return `line ${before.length}, column ${before.at(-1).length + 1}: expected ${wanted}, found ${found}.`;
  }
}

const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*/y;
const SCALAR = /true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const SPACE = /[ \t\n\r]*/y;

/** The first place that is no JSON, and what was wanted there. */
function fault(text) {
  let at = 0;
  let wrong = null;
  const fail = (wanted) => { wrong ??= { at, wanted }; return false; };
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (found) at += found[0].length;
    return Boolean(found);
  };
  const sign = (one) => { take(SPACE); if (text[at] !== one) return false; at += 1; return true; };
  const string = () => {
    take(SPACE);
    if (!take(STRING)) return fail('a name in "..."');
    return text[at] === '"' ? Boolean(at += 1) : fail('more of the text, or its closing "');
  };
  const list = (end, item) => {
    if (sign(end)) return true;
    do { if (!item()) return false; } while (sign(","));
    return sign(end) || fail(`"," or "${end}"`);
  };
  const value = () => {
    if (sign("{")) return list("}", () => string() && (sign(":") || fail('":"')) && value());
    if (sign("[")) return list("]", value);
    return text[at] === '"' ? string() : take(SCALAR) || fail("a value");
  };
  if (value()) take(SPACE);
  return wrong ?? { at, wanted: "nothing more" };
}
