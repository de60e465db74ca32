// Pictures that go along with a question, where the model reads images. They stay with the message, as data: addresses.

import { h, number } from "./dom.js";

const LIMIT = 20 * 1024 * 1024; // bytes of a file, as the server has it

export const isPicture = (file) => file.type.startsWith("image/");

/** A file as a picture: { name, url }. Raises Error in words for one that cannot go along. */
export async function readPicture(file, sees) {
  if (!sees) throw new Error(`${file.name} is a picture, and this model reads no images.`);
  if (file.size > LIMIT) throw new Error(`${file.name} has ${number(file.size / 1024 / 1024)} MiB; the limit is ${number(LIMIT / 1024 / 1024)} MiB.`);
  const reader = new FileReader();
  const url = await new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  return { name: file.name, url };
}

/** Those of a message's pictures that are some: what was imported may hold anything. */
export const picturesOf = (message) =>
  (Array.isArray(message.images) ? message.images : []).filter((one) => typeof one?.url === "string" && one.url.startsWith("data:image/"));

/** A small view of a picture. more: further elements. */
export const thumbnail = ({ name, url }, ...more) => h("div", { class: "thumbnail" }, h("img", { src: url, alt: name ?? "picture", title: name ?? "" }), more);

/** What of a prompt is images. images: how many tokens stand for each image, or tile of one; pictures: of the conversation, which
 * are shown beside their tokens where each is one image. */
export function spans(images, pictures) {
  const words = (tokens, one = "image") => h("small", {}, `${one}, ${number(tokens)} tokens`);
  if (pictures.length === images.length) return images.map((tokens, i) => thumbnail(pictures[i], words(tokens)));
  if (!pictures.length) return images.map((tokens) => words(tokens));
  return [...pictures.map((one) => thumbnail(one)), words(images.reduce((sum, tokens) => sum + tokens, 0), `${images.length} images or tiles`)];
}

/** The content of a message as the API wants it. */
export function contentOf(message) {
  const pictures = picturesOf(message).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!pictures.length) return message.content;
  return [...pictures, ...(message.content ? [{ type: "text", text: message.content }] : [])];
}
