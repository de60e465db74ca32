// The server's API: the key, JSON, and streams of events.

import { byId } from "./dom.js";

const KEY = "draftwing-key";

class ApiError extends Error {}

/** GET or POST; the answer as JSON. */
export async function ask(path, body, signal) {
  return (await fetched(path, body, signal)).json();
}

/** Calls `take` with the data of each server-sent event, until the stream ends. Raises ApiError. */
export async function stream(path, body, take, signal) {
  const reader = (await fetched(path, body, signal)).body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw inWords(error); });
    if (done) throw new ApiError("The connection to the server broke off.");
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(sentence(found.error.message));
      take(found);
    }
  }
}

async function fetched(path, body, signal) {
  for (;;) {
    const response = await fetch(path, options(body, signal)).catch((error) => { throw inWords(error); });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(await reason(response));
    if (!(await newKey())) throw new ApiError("The server needs an API key.");
  }
}

function options(body, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body === undefined) return { headers, signal };
  return { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body), signal };
}

async function reason(response) {
  const body = await response.json().catch(() => ({}));
  return sentence(body.message ?? body.error?.message ?? `The server answered ${response.status}.`);
}

const sentence = (words) => words.charAt(0).toUpperCase() + words.slice(1);

function inWords(error) {
  if (error.name === "AbortError" || error instanceof ApiError) return error;
  return new ApiError("The server does not answer. Is it still running?");
}

let asking = null;

/** Asks for a key once, however many requests want one; whether there is another one now. */
function newKey() {
  asking ??= dialog().finally(() => { asking = null; });
  return asking;
}

function dialog() {
  const box = byId("key-dialog");
  const field = byId("key");
  byId("key-error").hidden = !sessionStorage.getItem(KEY);
  field.value = "";
  box.showModal();
  return new Promise((resolve) => {
    const done = new AbortController();
    const listen = (target, kind, what) => target.addEventListener(kind, what, { signal: done.signal });
    const end = (taken) => {
      done.abort();
      if (taken) sessionStorage.setItem(KEY, field.value.trim());
      box.close();
      resolve(taken);
    };
    listen(byId("key-form"), "submit", (event) => {
      event.preventDefault();
      end(true);
    });
    listen(byId("key-cancel"), "click", () => end(false));
    listen(box, "cancel", () => end(false));
  });
}
