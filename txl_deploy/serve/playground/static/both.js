// @ts-check
/** The panel that shows one generation twice, side by side: with all of the memory, and with none. */

import { byId, element } from "./dom.js";
import { counted, percent, quoted, running, shade } from "./words.js";

/**
 * Generate twice from one text, at the same time and with the same seed, without the session of the page's text.
 * @param {import("./server.js").Server} server
 * @param {number[]} ids the text
 * @param {import("./story.js").Drawing & {count: number}} settings
 * @param {number} rows M
 * @param {AbortController} leave ends both; this function uses it, too, when one of them fails
 */
export async function generateBoth(server, ids, { count, ...drawing }, rows, leave) {
  byId("both-hint").textContent =
    `${counted(count, "token")} after the same ${counted(ids.length, "token")}, with the same seed ${drawing.seed}. Without memory the model sees one token alone, the last one. Neither goes into the text.`;
  const sides = [rows, 0].map((length) => {
    const title = length ? `With memory, ${counted(length, "row")}` : "Without memory";
    const text = element("p", { class: "tokens", role: "region", "aria-label": title, tabindex: 0 });
    return { length, text, side: element("div", {}, element("h3", {}, title), text) };
  });
  byId("sides").replaceChildren(...sides.map(({ side }) => side));
  byId("both").hidden = false;
  const one = async (/** @type {{length: number, text: HTMLElement}} */ { length, text }) => {
    const body = { prompt: ids.length ? ids : "", max_tokens: count, ...drawing, memory_length: length, logprobs: 0 };
    for await (const piece of server.complete(body, leave.signal)) {
      const { tokens, token_logprobs } = piece.choices[0].logprobs ?? { tokens: [], token_logprobs: [] };
      tokens.forEach((/** @type {string} */ name, /** @type {number} */ at) => {
        const title = `${quoted(name)}, ${percent(Math.exp(token_logprobs[at]))}`;
        text.append(element("span", { class: `token ${shade(token_logprobs[at])}`, title }, running(name)));
      });
    }
  };
  try {
    await Promise.all(sides.map(one));
  } finally {
    leave.abort(); // if one has failed, this ends the second
  }
}
