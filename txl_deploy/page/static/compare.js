// @ts-check
/** The panel that compares the loss of a text with all of the memory, with half, a quarter, and none. */

import { byId, element, table } from "./dom.js";
import { allOf } from "./server.js";
import { counted, percent, quoted, running } from "./words.js";

const SHOWN = 1000; // most tokens that are coloured and in the table, the last ones
const SURE = 2; // a difference of fewer standard errors is shown as "may be chance"
const [BLOCK, FEWEST] = [64, 8]; // most tokens of a block, fewest blocks for a standard error
const LEVELS = [1.1, 2, 5].map(Math.log); // least gains in nats of the three strengths of colour
const LEGEND = [
  [3, "memory makes it at least 5 times as likely"], [2, "2 to 5 times"], [1, "1.1 to 2 times"],
  [-1, "1.1 to 2 times less likely"], [-2, "2 to 5 times less"], [-3, "at least 5 times less"],
];

/** @typedef {{rows: number, losses: number[]}} Loss a memory length, and the loss in nats of every token but the first */

/** List the memory lengths to compare, e.g. [0, 2, 4, 8] for 8 rows. @param {number} rows */
export function lengths(rows) {
  return [...new Set([0, rows / 4, rows / 2, rows].map(Math.floor))];
}

/**
 * Ask the server for the losses of a text, once per memory length.
 * @param {import("./server.js").Backend} server
 * @param {number[]} ids
 * @param {number} rows M
 * @param {(said: string) => void} told shows the progress
 * @param {AbortSignal} signal
 * @returns {Promise<{losses: Loss[], names: string[]}>} losses, and the names of the tokens
 */
export async function measure(server, ids, rows, told, signal) {
  const losses = [];
  /** @type {string[]} */ let names = [];
  const all = lengths(rows);
  for (const [at, length] of all.entries()) {
    told(`Reading ${counted(ids.length, "token")} with ${counted(length, "memory row")}, ${at + 1} of ${all.length}.`);
    const body = { prompt: ids, max_tokens: 0, echo: true, logprobs: 0, memory_length: length };
    const tokens = await allOf(server.complete(body, signal));
    names = tokens.map(({ name }) => name);
    losses.push({ rows: length, losses: tokens.slice(1).map(({ logprob }) => -(logprob ?? NaN)) });
  }
  return { losses, names };
}

/** @param {number[]} values */
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/**
 * Estimate the standard error of a mean from the means of blocks: adjacent tokens are correlated, blocks hardly are.
 * @param {number[]} values
 * @returns {number | null} null for fewer than FEWEST values
 */
function errorOf(values) {
  const size = Math.min(BLOCK, Math.floor(values.length / FEWEST));
  if (!size) return null;
  const blocks = Array.from({ length: Math.floor(values.length / size) }, (_, at) => mean(values.slice(at * size, (at + 1) * size)));
  const middle = mean(blocks);
  return Math.sqrt(blocks.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (blocks.length - 1) / blocks.length);
}

/** Compute a difference of mean losses, and its standard error as text. @param {Loss} one @param {Loss} other */
function difference(one, other) {
  const each = one.losses.map((value, at) => value - other.losses[at]);
  const [value, error] = [mean(each), errorOf(each)];
  const chance = error === null || Math.abs(value) < SURE * error;
  return { value, error: error === null ? "" : ` ± ${error.toFixed(3)}`, said: chance ? "may be chance" : judged(-value) };
}

/** Return "better", "worse" or "the same" for a gain. @param {number} gain in nats; what is shown as 0.000 is none */
function judged(gain) {
  return Math.abs(gain) < 0.0005 ? "the same" : gain > 0 ? "better" : "worse";
}

/** Write a number with its sign, e.g. −0.250. @param {number} value */
function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
}

/** @param {number} rows @param {number} all */
function named(rows, all) {
  return rows === 0 ? "none" : `${rows === all ? "all " : ""}${counted(rows, "row")}`;
}

/**
 * Show the losses as a sentence, a table behind it and, for models with memory, token by token.
 * @param {Loss[]} losses the first without memory, the last with all of it
 * @param {string[]} names of the tokens; the first token has no loss
 * @param {number} segment
 */
export function showLosses(losses, names, segment) {
  const means = losses.map((loss) => mean(loss.losses));
  const all = losses[losses.length - 1];
  const rows = losses.map((loss, at) => {
    const { value, error, said } = difference(loss, all);
    return [named(loss.rows, all.rows), means[at].toFixed(4), Math.exp(means[at]).toFixed(3), loss === all ? "" : `${signed(value)}${error}, ${said}`];
  });
  const summary = table("Loss by memory length", ["Memory", "Mean loss, nats", "Perplexity", "Against all rows"], rows);
  const read = counted(all.losses.length, "token");
  if (losses.length < 2) return byId("compared").replaceChildren(element("p", {}, `Of ${read}. This model has no memory to compare with.`), summary);
  const gain = difference(losses[0], all);
  const [without, within] = [rows[0][2], rows[rows.length - 1][2]];
  const sentence =
    `Over ${read}, the memory ${gain.value >= 0 ? "lowers" : "raises"} the perplexity from ${without} to ${within}, ` +
    `and the mean loss by ${Math.abs(gain.value).toFixed(3)}${gain.error} nats${gain.said === "may be chance" ? ", which may be chance" : ""}.`;
  const meaning =
    "“Against all rows” is the mean loss less that with all rows: + is worse, − is better. " +
    "± is one standard error, which few tokens tell roughly; a difference below twice of it may be chance. " +
    `With no memory the text is cut into segments of ${segment}, and a token sees those before it in its own segment alone.`;
  const lengthwise = element("details", { open: matchMedia("(min-width: 40rem)").matches }, element("summary", {}, "By memory length"), summary, element("p", { class: "hint" }, meaning));
  byId("compared").replaceChildren(element("p", {}, sentence), lengthwise, ...tokenwise(losses[0], all, names));
}

/** Make the text coloured by each token's gain from memory, and a table of the losses. @param {Loss} none @param {Loss} all @param {string[]} names */
function tokenwise(none, all, names) {
  const first = Math.max(0, all.losses.length - SHOWN);
  const each = all.losses.slice(first).map((loss, at) => ({ name: names[first + at + 1], loss, without: none.losses[first + at] }));
  const rows = each.map(({ name, loss, without }, at) => [
    String(first + at + 2), element("bdi", { class: "name" }, quoted(name)), without.toFixed(3), loss.toFixed(3), `${signed(without - loss)}, ${judged(without - loss)}`,
  ]);
  const text = element("p", { class: "tokens gains", role: "region", "aria-label": "The text, coloured by what the memory did", tabindex: 0 });
  if (!first) text.append(element("span", { class: "token", title: `${quoted(names[0])}: nothing stands before it` }, running(names[0])));
  text.append(...each.map(({ name, loss, without }) => {
    const title = `${quoted(name)}: ${percent(Math.exp(-loss))} with memory, ${percent(Math.exp(-without))} without`;
    return element("span", { class: `token ${gainOf(without - loss)}`, title }, running(name));
  }));
  const of = first ? `the last ${SHOWN} of ${counted(all.losses.length, "token")}` : counted(each.length, "token");
  const columns = ["Token", "Text", "Loss without memory", "Loss with memory", "Lowered by memory"];
  const caption = element("figcaption", {}, `What the memory did for each token: ${of}.`);
  const legend = LEGEND.map(([level, words]) => element("li", {}, element("span", { class: `token g${level}` }, "a"), ` ${words}`));
  const numbers = element("details", {}, element("summary", {}, "The numbers"), table("Loss of each token", columns, rows));
  return [element("figure", {}, caption, text, element("ul", { class: "legend", "aria-label": "What the colours mean" }, ...legend), numbers)];
}

/** Return the CSS class of a gain: g1 … g3, g-1 … g-3, or "". @param {number} gain in nats */
function gainOf(gain) {
  const strength = LEVELS.filter((least) => Math.abs(gain) >= least).length;
  return strength ? `g${gain > 0 ? strength : -strength}` : "";
}
