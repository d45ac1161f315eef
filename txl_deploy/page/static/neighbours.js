// @ts-check
/** The panel of the neighbours behind a token: places where a datastore has read similar text. */

import { bar } from "./choices.js";
import { byId, element } from "./dom.js";
import { alone, percent, running } from "./words.js";

/**
 * @typedef {{token: string, before: string, after: string, share: number, distance: number, text: string, position: number}} Neighbour
 * @typedef {{searched: boolean, weight: number, alternatives: {id: number, token: string, probability: number, without: number}[], neighbours: Neighbour[]}} Answer
 *     of POST /v1/neighbours
 */

const [BEFORE, AFTER] = [60, 30]; // most characters around a neighbour's token

/**
 * Return the alternatives of an answer, and the text's own token if it is none of them. Their `logprob` is the model's own.
 * @param {Answer} answer
 * @param {import("./story.js").Token} token
 * @returns {import("./story.js").Choice[]}
 */
export function alternativesOf(answer, token) {
  const found = answer.alternatives.map(({ id, token: name, probability, without }) => ({ id, name, logprob: Math.log(without), mixed: probability }));
  return [...found, ...token.best.filter(({ id }) => id === token.id && !found.some((other) => other.id === id))];
}

/** Show a passage on one line: line ends and tabs are symbols. @param {string} text */
function line(text) {
  return running(text).replace(/[\n\t]/g, " ");
}

/** Make a list item. @param {Neighbour} neighbour */
function itemOf({ token, before, after, share, distance, text, position }) {
  const [left, right] = [[...before], [...after]];
  const lead = `${left.length > BEFORE ? "…" : ""}${line(left.slice(-BEFORE).join(""))}`;
  const rest = `${line(right.slice(0, AFTER).join(""))}${right.length > AFTER ? "…" : ""}`;
  const passage = element("bdi", { class: "passage" }, lead, element("mark", {}, alone(token)), rest);
  const place = element("span", { class: "hint" }, `${percent(share)} at distance ${distance.toPrecision(3)}, `, element("bdi", {}, alone(text)), `, position ${position.toLocaleString("en")}`);
  return element("li", {}, passage, place, bar(share));
}

/** Say what a list of neighbours means. @param {Answer} answer */
function meaning({ searched, weight, neighbours }) {
  if (!searched) return "The gate made no search.";
  if (!neighbours.length) return "No neighbour has a share of the probability.";
  return `${percent(weight)} of the probability come from what the datastore has read. The marked tokens came next there, after what resembles the text before this one.`;
}

/** Show the neighbours of an answer, a sentence in their place, or, for null, nothing. @param {Answer | string | null} answer */
export function showNeighbours(answer) {
  byId("neighbours").hidden = answer === null;
  byId("neighbours-hint").textContent = answer === null || typeof answer === "string" ? answer : meaning(answer);
  byId("neighbours-list").replaceChildren(...(answer === null || typeof answer === "string" ? [] : answer.neighbours.map(itemOf)));
}
