// Files that the page saves and opens.

import { h } from "./dom.js";

/** Has the browser save a text. */
export function saveFile(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000); // by then it has been read
}

/** Asks for files, and calls `take` with each. accept: their types, as an input takes them. */
export function chooseFile(accept, take, multiple = false) {
  const input = h("input", { type: "file", accept, multiple });
  input.addEventListener("change", () => [...input.files].forEach((file) => take(file)));
  input.click();
}
