// @ts-check
/** The iterator that `Stream.generate` returns, and the ends of its sequences: stop token, stop text or last token. */

import { UsageError, shown } from "./errors.js";
import { TextStream } from "./vocabulary.js";

/** An async iterator of drawn tokens, int32 [b] each; `texts` iterates over their text instead. */
export class Generation {
  #drawn;
  #ends;

  /** @param {AsyncGenerator<Int32Array, void>} drawn @param {Ends} ends */
  constructor(drawn, ends) {
    this.#drawn = drawn;
    this.#ends = ends;
  }

  [Symbol.asyncIterator]() {
    return this.#drawn;
  }

  /** Return the next tokens, as iterators do. */
  next() {
    return this.#drawn.next();
  }

  /** The model's own log-probabilities of the latest tokens, float32 [b]; null before the first token and without `logprobs: true`. */
  get logprobs() {
    return this.#ends.logprobs;
  }

  /**
   * Iterate over the tokens as text: for each, the text that it completes, a string for each of b sequences.
   *
   * Unfinished characters, and text that may become a stop text, are held back until a sequence's last token. A stop text,
   * any text after it, and a stop token are left out.
   */
  texts() {
    this.#ends.read();
    return this.#said();
  }

  async *#said() {
    for await (const _ of this.#drawn) yield this.#ends.said;
  }

  /** End the generation, and return the text that `texts` still holds back; only a caller that stops early needs it. */
  async finish() {
    await this.#drawn.return();
    return this.#ends.rest();
  }
}

/** A watcher of b sequences that ends each at a stop token or stop text, and keeps the latest tokens' text. */
export class Ends {
  /** @type {TextStream[]} */
  #texts = [];
  /** @type {Float32Array | null} */
  logprobs = null;
  /** @type {string[]} */
  said = [];

  /**
   * @param {number} b
   * @param {number[]} tokens
   * @param {string[]} stops
   * @param {import("./vocabulary.js").Vocabulary | null} vocabulary
   */
  constructor(b, tokens, stops, vocabulary) {
    this.b = b;
    this.tokens = new Set(tokens);
    this.stops = stops;
    this.vocabulary = vocabulary;
    if (stops.length) this.read();
  }

  /** Turn tokens into text, from the next token on. */
  read() {
    if (this.vocabulary === null) throw new UsageError("the bundle has no vocabulary to read tokens as text, expected one; use token ids and stopTokens, or export with --vocabulary FILE");
    if (!this.#texts.length) this.#texts = Array.from({ length: this.b }, () => new TextStream(this.stops));
  }

  /** Return the text that is held back of each sequence. */
  rest() {
    this.read();
    return this.#texts.map((text) => text.finish());
  }

  /**
   * Take tokens [b], one of each running sequence, and clear `running` of a sequence that ends.
   * @param {Int32Array} tokens
   * @param {boolean[]} running
   * @param {boolean} last whether these are the last tokens
   */
  take(tokens, running, last) {
    const ended = Array.from(tokens, (token) => this.tokens.has(token));
    this.said = this.#texts.map((text, row) => {
      if (!running[row]) return "";
      let said = "";
      if (!ended[row]) {
        said = text.feed(/** @type {import("./vocabulary.js").Vocabulary} */ (this.vocabulary).decode([tokens[row]]));
        ended[row] = text.stopped;
      }
      return last || ended[row] ? said + text.finish() : said;
    });
    ended.forEach((ends, row) => ends && (running[row] = false));
  }
}

/** Return the texts that end a sequence; a string is a single one. @param {any} given @returns {string[]} */
export function checkStopTexts(given) {
  const found = typeof given === "string" ? [given] : given;
  if (!Array.isArray(found) || !found.every((text) => typeof text === "string" && text)) throw new UsageError(`stopTexts is ${shown(given)}, expected a list of texts of at least one character each`);
  return found;
}
