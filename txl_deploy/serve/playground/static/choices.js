// @ts-check
/** The panel of alternatives: tokens that could stand at a place or come next, each with its probability. */

import { button, byId, drawn, element, unseen } from "./dom.js";
import { alone, percent, quoted } from "./words.js";

/** @typedef {import("./story.js").Choice} Choice */

/** Draw a bar as long as a probability. @param {number} probability */
function bar(probability) {
  const length = (100 * probability).toFixed(2);
  const box = { class: "bar", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" };
  return drawn("svg", box, drawn("rect", { width: length, height: 4 }));
}

/**
 * Show alternatives.
 * @param {string} of the sentence above them
 * @param {Choice[]} best
 * @param {number | null} own id of the token that stands there; null: none yet
 * @param {string} verb begins each button's name, e.g. "Append"
 * @param {(choice: Choice) => void} chosen
 */
export function showChoices(of, best, own, verb, chosen) {
  byId("choices-of").textContent = of;
  const items = best.map((choice) => {
    const probability = Math.exp(choice.logprob);
    const number = element("span", { class: "number" }, percent(probability));
    if (choice.id === own) {
      const text = element("span", { class: "name" }, element("bdi", {}, quoted(choice.name)), " stands there");
      return element("li", { class: "own" }, element("span", { class: "choice" }, text, number), bar(probability));
    }
    const name = element("span", { class: "name" }, unseen(`${verb} `), element("bdi", {}, quoted(choice.name)), " ");
    const made = button("", () => chosen(choice), name, number);
    made.className = "choice";
    made.title = `${verb} ${alone(choice.name)}`;
    return element("li", {}, made, bar(probability));
  });
  byId("choices-list").replaceChildren(...items);
}

/** Show a sentence in place of alternatives. @param {string} sentence */
export function showNoChoices(sentence) {
  byId("choices-of").textContent = sentence;
  byId("choices-list").replaceChildren();
}
