// The server's API: the key, JSON, and streams of events.

import { byId } from "./dom.js";

const KEY = "draftwing-key";
const SENDABLE = /^[\x20-\x7e]+$/; // a browser refuses to send most of what is not ASCII
const UNSEEN = /[\u200b-\u200f\u2060\ufeff]/g; // what comes along when a key is copied out of a mail

let tried = null; // a key that the server has not taken yet

class ApiError extends Error {}

let model = null;

/** From now on the server is asked of this one of its models. */
export function choose(name) {
  model = name;
}

/** What the server is to keep an answer as, so that nobody can guess it: { id, model }. */
export const newKept = () => ({ id: [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join(""), model });

/** GET or POST; the answer as JSON. ofModel: whether the model that was chosen is asked, or the server of several. */
export async function ask(path, body, signal, ofModel = true) {
  return (await fetched(ofModel ? named(path) : path, body, signal)).json();
}

const named = (path, of = model) => (of === null ? path : `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams({ model: of })}`);

/** Calls `take` with the data of each server-sent event, until the stream ends. Raises ApiError. kept: { id, model, seen },
 * what the server keeps the stream as, and how many of its events were here. */
export async function stream(path, body, take, signal, kept = null) {
  const reader = (await fetched(named(path, kept?.model), body, signal, kept)).body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw inWords(error); });
    if (done) throw lost("The connection to the server broke off.");
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (kept) kept.seen += 1;
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(sentence(found.error.message));
      take(found);
    }
  }
}

/** Ends a stream that the server keeps, and forgets it. */
export async function forget({ id, model: of }) {
  const { headers } = options(undefined, undefined, tried ?? stored());
  await fetch(`.${named(`/ui/answers/${id}`, of)}`, { method: "DELETE", headers, keepalive: true }).catch(() => {});
}

async function fetched(path, body, signal, kept = null) {
  for (;;) {
    const key = tried ?? stored();
    const response = await fetch(`.${path}`, options(body, signal, key, kept)).catch((error) => { throw inWords(error); });
    if (response.status !== 401 && key !== null && key === tried) {
      sessionStorage.setItem(KEY, key);
      tried = null;
    }
    if (response.ok) return response;
    if (response.status !== 401) throw Object.assign(new ApiError(await reason(response)), { gone: response.status === 404 });
    if (!(await newKey(key))) throw new ApiError("The server needs an API key.");
  }
}

/** The key that the server took; null where there is none that can be sent. */
function stored() {
  const key = sessionStorage.getItem(KEY);
  return key !== null && SENDABLE.test(key) ? key : null;
}

function options(body, signal, key, kept = null) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body === undefined) return { headers, signal };
  if (kept) headers["x-draftwing-keep"] = kept.id;
  return { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body), signal };
}

async function reason(response) {
  const body = await response.json().catch(() => ({}));
  const { error } = body; // of Ollama's routes a text
  return sentence(body.message ?? error?.message ?? (typeof error === "string" ? error : null) ?? `The server answered ${response.status}.`);
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

function inWords(error) {
  if (error.name === "AbortError" || error instanceof ApiError) return error;
  return lost("The server does not answer. Is it still running?");
}

/** An error of the connection alone. */
const lost = (words) => Object.assign(new ApiError(words), { lost: true });

let asking = null;

/** Asks for a key once, however many requests want one; whether there is another one now. refused: what was sent. */
async function newKey(refused) {
  if (!asking && refused !== (tried ?? stored())) return true; // meanwhile another request got one
  asking ??= dialog(refused && "The server does not take this key.").finally(() => { asking = null; });
  return asking;
}

/** wrong: what to say of the key before, if anything. */
function dialog(wrong) {
  const box = byId("key-dialog");
  const field = byId("key");
  const complain = (words) => {
    byId("key-error").textContent = words ?? "";
    byId("key-error").hidden = !words;
    field.value = "";
  };
  complain(wrong);
  box.showModal();
  return new Promise((resolve) => {
    const done = new AbortController();
    const listen = (target, kind, what) => target.addEventListener(kind, what, { signal: done.signal });
    const end = (taken) => {
      done.abort();
      box.close();
      resolve(taken);
    };
    listen(byId("key-form"), "submit", (event) => {
      event.preventDefault();
      const key = field.value.replace(UNSEEN, "").trim();
      if (!SENDABLE.test(key)) {
        complain("Keys have letters, digits and signs of ASCII alone, and this one has others. Type it, or copy it again.");
        return;
      }
      tried = key;
      end(true);
    });
    listen(byId("key-cancel"), "click", () => end(false));
    listen(box, "cancel", () => end(false));
  });
}
