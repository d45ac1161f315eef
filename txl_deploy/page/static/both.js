// @ts-check
/** The panel that shows one generation twice, side by side: with all of the memory, and by segments without memory. */

import { byId, element } from "./dom.js";
import { allOf } from "./server.js";
import { counted, percent, quoted, running, shade } from "./words.js";

const SEEDS = 2 ** 53; // the field takes seeds below this

/**
 * Generate twice from one text, at the same time, without the session of the page's text.
 * @param {import("./server.js").Backend} server
 * @param {number[]} ids the text
 * @param {import("./story.js").Drawing & {count: number}} settings
 * @param {number} rows M
 * @param {number} segment L, the most tokens that the model reads at once
 * @param {AbortController} leave ends both; this function uses it, too, when one of them fails
 */
export async function generateBoth(server, ids, { count, seed, ...drawing }, rows, segment, leave) {
  const last = segment === 1 ? "the last token" : `the last ${counted(segment, "token")}`;
  byId("both-hint").textContent =
    `${counted(count, "token")} after the same ${counted(ids.length, "token")}; neither goes into the text. With memory, one request reads the whole text and draws with seed ${seed}. ` +
    `Without memory, each token is a request of its own, which reads ${last} in a fresh state, as a model of one segment and no memory would, and draws with the next seed: ${seed}, ${(seed + 1) % SEEDS} and so on.`;
  const [body, signal] = [{ ...drawing, logprobs: 0 }, leave.signal];
  const withMemory = () => server.complete({ ...body, prompt: ids.length ? ids : "", max_tokens: count, memory_length: rows, seed }, signal);
  /** @returns {import("./server.js").Pieces} */
  const bySegments = async function* () {
    let read = ids.slice(-segment);
    for (let at = 0; at < count; at += 1) {
      const echo = !read.length; // tells the token with which an empty text begins
      const one = { ...body, prompt: echo ? "" : read, max_tokens: 1, echo, memory_length: rows, seed: (seed + at) % SEEDS };
      const tokens = await allOf(server.complete(one, signal, at > 0));
      read = [...read, ...tokens.map(({ id }) => id)].slice(-segment);
      yield { tokens: tokens.slice(-1) };
    }
  };
  /** @type {[string, () => import("./server.js").Pieces][]} */
  const ways = [[`With memory, ${counted(rows, "row")}`, withMemory], [`Without memory, ${last}`, bySegments]];
  const sides = ways.map(([title, generate]) => {
    const text = element("p", { class: "tokens", role: "region", "aria-label": title, tabindex: 0 });
    return { generate, text, side: element("div", {}, element("h3", {}, title), text) };
  });
  byId("sides").replaceChildren(...sides.map(({ side }) => side));
  byId("both").hidden = false;
  const one = async (/** @type {{generate: () => import("./server.js").Pieces, text: HTMLElement}} */ { generate, text }) => {
    for await (const { tokens } of generate()) {
      for (const { name, logprob } of tokens) {
        const title = `${quoted(name)}, ${percent(Math.exp(logprob ?? NaN))}`;
        text.append(element("span", { class: `token ${shade(logprob)}`, title }, running(name)));
      }
    }
  };
  try {
    await Promise.all(sides.map(one));
  } finally {
    leave.abort(); // if one has failed, this ends the second
  }
}
