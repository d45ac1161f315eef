// @ts-check
/** The panel of alternatives: tokens that could stand at a place or come next. */

import { button, byId, drawn, element, unseen } from "./dom.js";
import { alone, percent, quoted } from "./words.js";

/** @typedef {import("./story.js").Choice} Choice */

/** Draw a bar as long as a probability. @param {number} probability @param {string} [kind] its classes */
export function bar(probability, kind = "bar") {
  const length = (100 * probability).toFixed(2);
  const box = { class: kind, viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" };
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
    const both = choice.mixed !== undefined;
    const number = element("span", { class: "number" }, both ? `${percent(choice.mixed ?? 0)}, ${percent(probability)} without` : percent(probability));
    const bars = both ? [bar(choice.mixed ?? 0), bar(probability, "bar without")] : [bar(probability)];
    if (choice.id === own) {
      const text = element("span", { class: "name" }, element("bdi", {}, quoted(choice.name)), " stands there");
      return element("li", { class: "own" }, element("span", { class: "choice" }, text, number), ...bars);
    }
    const name = element("span", { class: "name" }, unseen(`${verb} `), element("bdi", {}, quoted(choice.name)), " ");
    const made = button("", () => chosen(choice), name, number);
    made.className = "choice";
    made.title = `${verb} ${alone(choice.name)}`;
    return element("li", {}, made, ...bars);
  });
  const list = byId("choices-list");
  const held = list.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).title : null;
  list.replaceChildren(...items);
  if (held === null) return;
  const buttons = [...list.querySelectorAll("button")];
  (buttons.find(({ title }) => title === held) ?? buttons[0])?.focus(); // drawn anew with the datastore's answer, below a user's hands
}

/** Show a sentence in place of alternatives. @param {string} sentence */
export function showNoChoices(sentence) {
  byId("choices-of").textContent = sentence;
  byId("choices-list").replaceChildren();
}
