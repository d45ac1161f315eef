// @ts-check
/** What a page that is loaded again finds: the text and the fields, in the storage of this tab, which ends with the tab. */

import { byId } from "./dom.js";

const NAME = "playground";
const FIELDS = ["draft", "count", "temperature", "top-k", "top-p", "seed", "memory", "by-id", "numbers"];

/** @typedef {import("./story.js").Token} Token */

/** Store what there is; a long text without the alternatives of its tokens. @param {string} model its id @param {Token[]} tokens */
export function store(model, tokens) {
  const fields = FIELDS.map((id) => [byId(id).value, byId(id).checked]);
  for (const most of [10, 0]) {
    const plain = tokens.map((token) => ({ ...token, best: token.best.slice(0, most), by: null }));
    try {
      return sessionStorage.setItem(NAME, JSON.stringify({ model, fields, tokens: plain }));
    } catch {
      // it is too long, or the browser stores nothing
    }
  }
}

/** Fill the fields in as they were. @param {string} model its id @returns {Token[]} the text; none where nothing of this model is stored */
export function stored(model) {
  try {
    const found = JSON.parse(sessionStorage.getItem(NAME) ?? "{}");
    if (found.model !== model) return [];
    FIELDS.forEach((id, at) => ([byId(id).value, byId(id).checked] = found.fields[at]));
    return found.tokens;
  } catch {
    return []; // the browser stores nothing
  }
}
