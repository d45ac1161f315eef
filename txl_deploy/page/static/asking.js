// @ts-check
/** Bodies of completion requests, checked against the server's limits. */

import { counted } from "./words.js";

const BEST = 10; // alternatives of each token

/**
 * Throw before a request is sent if it exceeds a limit of the server.
 * @param {any} limits as GET /v1/models lists them
 * @param {number[]} before tokens that go in before the draft
 * @param {import("./story.js").Draft} draft
 * @param {number} count tokens to generate
 */
export function checkSize(limits, before, draft, count) {
  const length = before.length + draft.ids.length;
  const size = before.length ? JSON.stringify([...before, ...draft.ids]).length : new Blob([JSON.stringify(draft.text ?? draft.ids)]).size;
  const most = limits.body_bytes - 1024; // bytes; 1024 are left for the other fields
  const many = (/** @type {number} */ tokens) => `${counted(tokens, "token")} are too many, the server`;
  const told = limits.answer_logprobs;
  if (count > limits.max_tokens) throw new Error(`${many(count)} generates at most ${counted(limits.max_tokens, "token")} at once.`);
  if (length > limits.prompt_tokens) throw new Error(`${many(length)} reads at most ${counted(limits.prompt_tokens, "token")} at once.`);
  if (length + count > told) throw new Error(`${many(length + count)} tells at most ${counted(told, "probability", "probabilities")} at once.`);
  if (size > most) throw new Error(`The request has ${counted(size, "byte")}, the server takes at most ${counted(most, "byte")} at once.`);
}

/**
 * Make the body of a completion, without its session.
 * @param {any} limits as GET /v1/models lists them
 * @param {number[]} before tokens that go in before the draft
 * @param {import("./story.js").Draft} draft
 * @param {import("./story.js").Drawing} drawing
 * @param {number} count tokens to generate
 */
export function bodyOf(limits, before, draft, drawing, count) {
  const ids = [...before, ...draft.ids];
  const room = Math.floor(limits.answer_logprobs / Math.max(1, ids.length + count));
  const logprobs = Math.max(0, Math.min(BEST, limits.logprobs, room));
  const prompt = before.length === 0 && draft.text !== null ? draft.text : ids;
  return { prompt, max_tokens: count, ...drawing, logprobs, echo: true };
}
