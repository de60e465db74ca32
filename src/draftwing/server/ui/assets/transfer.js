// Conversations as files: JSON that can be read in again, and Markdown.

import { Conversation, toKeep } from "./branches.js";

const FORMAT = "draftwing-conversations";
const VERSION = 1;

/** All versions of all messages, as JSON. */
export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: conversations.map(toKeep) }, null, 1);
}

/** Conversations of a file; besides ours, a list of messages { role, content } is one. Raises an Error in words. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("It is not JSON.");
  }
  if (data?.version > VERSION) throw new Error("It comes from a newer version of draftwing.");
  const listed = Array.isArray(data) && data.every((one) => typeof one?.role === "string") ? [ofChat(data)] : data?.conversations;
  const found = (Array.isArray(listed) ? listed : []).map((one) => Conversation.from(one));
  if (!found.length || found.includes(null)) {
    throw new Error("Expected an export of this page, or a list of messages with role and content.");
  }
  return found;
}

/** What is shown of a conversation, as Markdown. */
export function toMarkdown({ title, system, messages }) {
  const parts = [`# ${title}`];
  if (system.trim()) parts.push("## System", system.trim());
  for (const { role, content, answers } of messages) {
    if (role === "user") parts.push("## User", content.trim());
    for (const answer of answers ?? []) {
      const how = answers.length < 2 ? "" : answer.drafts ? " (with drafts)" : " (without drafts)";
      parts.push(`## Assistant${how}`, answer.content.trim());
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** A name that each file system takes. */
export function fileName(title, ending) {
  const plain = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${plain || "conversation"}.${ending}`;
}

/** Has the browser save a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function ofChat(list) {
  const system = list.filter(({ role }) => role === "system").map(({ content }) => content).join("\n\n");
  const said = list.filter(({ role }) => role !== "system").map(({ role, content }) => {
    return role === "assistant" ? { role, content, answers: [{ content, reasoning: "", drafts: true }] } : { role, content };
  });
  const id = crypto.getRandomValues(new Uint32Array(2)).join("-");
  return { id, title: "", system, messages: said };
}
