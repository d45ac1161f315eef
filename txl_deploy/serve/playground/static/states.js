// @ts-check
/** The list of states that one can go back to, the newest first. */

import { button, byId, element } from "./dom.js";
import { counted, running } from "./words.js";

const TAIL = 12; // tokens of a state's text that are shown

/**
 * @param {import("./story.js").Story} story
 * @param {(state: import("./story.js").State) => void} back
 */
export function showStates(story, back) {
  const items = story.states.map((state) => {
    const here = story.at(state);
    const made = button(`Go back to ${state.number}`, () => back(state));
    const end = state.tokens.slice(-TAIL).map((token) => running(token.name)).join("");
    const text = element("bdi", { class: "tail" }, state.tokens.length ? `…${end}`.replaceAll("\n", " ") : "the beginning");
    const rows = state.fill === null ? "" : `, ${counted(state.fill, "memory row")}`;
    const facts = `${counted(state.tokens.length, "token")}${rows}${state.kept ? ", kept by you" : ""}`;
    const then = state.then ? element("span", { class: "hint" }, `then ${state.then}`) : "";
    const item = element("li", { value: state.number }, made, element("div", {}, text, element("span", { class: "hint" }, facts), then));
    if (here) item.setAttribute("aria-current", "true");
    return item;
  });
  const list = byId("states");
  const focused = list.contains(document.activeElement) ? document.activeElement?.textContent : null;
  list.replaceChildren(...items.reverse());
  if (focused) [...list.querySelectorAll("button")].find((made) => made.textContent === focused)?.focus();
  list.hidden = !items.length;
}
