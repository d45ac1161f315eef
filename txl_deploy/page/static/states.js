// @ts-check
/** The list of states to which the user can go back, the newest first. */

import { button, byId, element } from "./dom.js";
import { counted, running } from "./words.js";

const TAIL = 12; // last tokens of a state's text that are shown

/**
 * Show the list; the button that had the focus gets it again.
 * @param {import("./story.js").Story} story
 * @param {(state: import("./story.js").State) => void} back
 */
export function showStates(story, back) {
  const items = story.states.map((state) => {
    const here = story.at(state);
    const made = button(`Go back to ${state.number}`, () => back(state));
    const end = state.tokens.slice(-TAIL).map((token) => running(token.name)).join("");
    const name = element("bdi", {}, running(state.name) || (state.tokens.length ? `After ${counted(state.tokens.length, "token")}` : "The beginning"));
    const text = state.tokens.length ? element("span", { class: "hint" }, "ends in ", element("bdi", { class: "tail" }, `“${end.replace(/\s+/g, " ")}”`)) : "";
    const rows = state.fill === null ? [] : [`${counted(state.fill, "memory row")} filled`];
    const later = state.lead ? [`${counted(state.lead, "token")} to go in`] : [];
    const facts = [...(state.name ? [counted(state.tokens.length, "token")] : []), ...rows, ...later, ...(state.kept ? ["kept by you"] : [])].join(", ");
    const then = state.then ? element("span", { class: "hint" }, `then ${state.then}`) : "";
    const item = element("li", { value: state.number }, made, element("div", {}, name, element("span", { class: "hint" }, facts), text, then));
    if (here) item.setAttribute("aria-current", "true");
    return item;
  });
  const list = byId("states");
  const focused = list.contains(document.activeElement) ? document.activeElement?.textContent : null;
  list.replaceChildren(...items.reverse());
  if (focused) [...list.querySelectorAll("button")].find((made) => made.textContent === focused)?.focus();
  list.hidden = !items.length;
}
