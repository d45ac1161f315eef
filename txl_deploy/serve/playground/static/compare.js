// @ts-check
/** The loss of a text with all of its memory, with a part of it, and with none. */

import { byId, drawn, element, table } from "./dom.js";
import { counted, quoted } from "./words.js";

const SHOWN = 200; // tokens in the drawing and in the table of tokens
const [WIDTH, HEIGHT, LEFT] = [720, 200, 44];

/** @typedef {{rows: number, losses: number[]}} Loss one memory length, and the loss of every token but the first */

/** The memory lengths that are compared: none, a quarter, a half and all of it. @param {number} rows */
export function lengths(rows) {
  return [...new Set([0, rows / 4, rows / 2, rows].map(Math.floor))];
}

/**
 * Ask for the losses of a text.
 * @param {import("./server.js").Server} server
 * @param {number[]} ids
 * @param {number} rows M
 * @param {(said: string) => void} told
 * @param {AbortSignal} signal
 * @returns {Promise<{losses: Loss[], names: string[]}>} and the names of the tokens
 */
export async function measure(server, ids, rows, told, signal) {
  const losses = [];
  let names = [];
  const all = lengths(rows);
  for (const [at, length] of all.entries()) {
    told(`Reading ${counted(ids.length, "token")} with ${counted(length, "memory row")}, ${at + 1} of ${all.length}.`);
    const body = { prompt: ids, max_tokens: 0, echo: true, logprobs: 0, memory_length: length };
    const answer = await server.ask("POST", "/v1/completions", body, { signal });
    /** @type {(number | null)[]} */ const logprobs = answer.choices[0].logprobs.token_logprobs;
    names = answer.choices[0].logprobs.tokens;
    losses.push({ rows: length, losses: logprobs.slice(1).map((value) => -(value ?? NaN)) });
  }
  return { losses, names };
}

/** @param {number[]} values */
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** A number with its sign, as people write it. @param {number} value */
function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
}

/** @param {number} rows @param {number} all */
function named(rows, all) {
  return rows === 0 ? "none" : `${rows === all ? "all " : ""}${counted(rows, "row")}`;
}

/** A bar of a mean loss, and the number behind it. @param {number} value @param {number} most */
function barred(value, most) {
  const bar = drawn("svg", { class: "bar", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" });
  bar.append(drawn("rect", { width: (100 * value) / (most || 1), height: 4 }));
  return element("span", { class: "barred" }, value.toFixed(4), bar);
}

/**
 * @param {Loss[]} losses the last is with all of the memory, the first without any
 * @param {string[]} names of the tokens; the first one has no loss
 * @param {number} segment
 */
export function showLosses(losses, names, segment) {
  const means = losses.map((loss) => mean(loss.losses));
  const all = losses[losses.length - 1];
  const rows = losses.map((loss, at) => [
    named(loss.rows, all.rows),
    barred(means[at], Math.max(...means)),
    Math.exp(means[at]).toFixed(3),
    loss === all ? "" : signed(means[at] - means[means.length - 1]),
  ]);
  const summary = table("Loss by memory length", ["Memory", "Mean loss, nats", "Perplexity", "Difference"], rows);
  const read = counted(all.losses.length, "token");
  const gain = means[0] - means[means.length - 1];
  const sentence =
    losses.length < 2
      ? `Of ${read}. This model has no memory to compare with.`
      : `Over ${read}, the memory ${gain >= 0 ? "lowers" : "raises"} the mean loss by ${Math.abs(gain).toFixed(3)} nats. ` +
        `Without memory a token still sees those before it in its own segment of ${segment}.`;
  /** @type {HTMLElement[]} */ const parts = [element("p", {}, sentence), summary];
  if (losses.length > 1) parts.push(...tokenwise(losses[0], all, names));
  byId("compared").replaceChildren(...parts);
}

/** What the memory changed at every token: a drawing, and its numbers. @param {Loss} none @param {Loss} all @param {string[]} names */
function tokenwise(none, all, names) {
  const first = Math.max(0, all.losses.length - SHOWN);
  const gains = none.losses.map((value, at) => value - all.losses[at]).slice(first);
  const rows = gains.map((gain, at) => [
    String(first + at + 2),
    element("bdi", { class: "name" }, quoted(names[first + at + 1])),
    none.losses[first + at].toFixed(3),
    all.losses[first + at].toFixed(3),
    signed(gain),
  ]);
  const of = first ? `the last ${SHOWN} of ${all.losses.length} tokens` : counted(gains.length, "token");
  const columns = ["Token", "Text", "Loss without memory", "Loss with memory", "Lowered by"];
  const caption = element("figcaption", {}, `How much the memory lowers the loss of each token: ${of}.`);
  const numbers = element("details", {}, element("summary", {}, "The numbers"), table("Loss of each token", columns, rows));
  const graph = element("div", { class: "wide", role: "region", "aria-label": "Drawing of what the memory lowers", tabindex: 0 }, graphOf(gains, names.slice(first + 1)));
  return [element("figure", {}, caption, graph, numbers)];
}

/** Bars above the line where the memory helps, below it where it harms. @param {number[]} gains @param {string[]} names */
function graphOf(gains, names) {
  const high = Math.max(0.1, ...gains);
  const low = Math.min(-0.1, ...gains);
  const y = (/** @type {number} */ value) => 10 + ((high - value) / (high - low)) * (HEIGHT - 20);
  const step = (WIDTH - LEFT) / gains.length;
  const attributes = { class: "graph", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-labelledby": "gain-title gain-text" };
  const graph = drawn("svg", attributes, drawn("title", { id: "gain-title" }, "Loss without memory less loss with memory, by token"));
  const helped = gains.filter((gain) => gain > 0).length;
  graph.append(drawn("desc", { id: "gain-text" }, `${helped} of ${counted(gains.length, "token")} have a lower loss with memory. From ${low.toFixed(2)} to ${high.toFixed(2)} nats.`));
  for (const value of [high, 0, low]) {
    graph.append(drawn("line", { class: value ? "grid" : "axis", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value) }));
    graph.append(drawn("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value ? signed(value).slice(0, 5) : "0"));
  }
  gains.forEach((gain, at) => {
    const top = y(Math.max(gain, 0));
    const height = Math.abs(y(gain) - y(0)).toFixed(2);
    const place = { x: (LEFT + at * step).toFixed(2), y: top.toFixed(2), width: (step * 0.85).toFixed(2), height };
    graph.append(drawn("rect", { class: gain < 0 ? "point harm" : "point help", ...place }, drawn("title", {}, `${quoted(names[at])} ${signed(gain)}`)));
  });
  return graph;
}
