// @ts-check
/** The page's text and fields in the session storage of its tab, from which a reload takes them. */

import { byId } from "./dom.js";

const NAME = "playground";
const FIELDS = ["draft", "count", "temperature", "top-k", "top-p", "seed", "memory", "by-id", "numbers"];

/** @typedef {import("./story.js").Token} Token */

/** Store text and fields; if the text is too long, without alternatives. @param {string} model its id @param {Token[]} tokens */
export function store(model, tokens) {
  const fields = FIELDS.map((id) => [byId(id).value, byId(id).checked]);
  for (const most of [10, 0]) {
    const plain = tokens.map((token) => ({ ...token, best: token.best.slice(0, most), by: null }));
    try {
      return sessionStorage.setItem(NAME, JSON.stringify({ model, fields, tokens: plain }));
    } catch {
      // the storage is full, or the browser allows none
    }
  }
}

/** Restore the fields. @param {string} model its id @returns {Token[]} the stored text; [] if none of this model is stored */
export function stored(model) {
  try {
    const found = JSON.parse(sessionStorage.getItem(NAME) ?? "{}");
    if (found.model !== model) return [];
    FIELDS.forEach((id, at) => ([byId(id).value, byId(id).checked] = found.fields[at]));
    return found.tokens;
  } catch {
    return []; // the browser allows no storage
  }
}
