// @ts-check
/** Vocabularies, which turn text into token ids and back, and text that comes token by token. */

import { BundleError, UnsupportedError, UsageError, brief, isWhole, oneLine, shown } from "./errors.js";

/** @typedef {Bytes | Words} Vocabulary */

const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"; // Python's str.isspace, which trim() is not
const ENDS = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g");
const RUNS = new RegExp(`[${SPACE}]+`);
const ASCII = /^[\x00-\x7f]*$/;

/** @param {string | Uint8Array} text @returns {Uint8Array} */
function asBytes(text) {
  if (text instanceof Uint8Array) return text;
  if (typeof text !== "string") throw new UsageError(`the text is ${shown(text)}, expected a string or a Uint8Array`);
  if (/\p{Surrogate}/u.test(text)) throw new UsageError("the text cannot be written as UTF-8 (it holds half a character), expected text; convert it");
  return new TextEncoder().encode(text);
}

/** @param {ArrayLike<number>} tokens @param {number} many @returns {number[]} */
function checkIds(tokens, many) {
  const found = Array.from(tokens ?? [NaN]);
  if (!found.every((token) => isWhole(token) && token >= 0 && token < many)) throw new UsageError(`tokens to decode are ${shown(found.slice(0, 8))}, expected ids of 0 … ${many - 1}`);
  return found;
}

/** A vocabulary in which every byte is a token. */
export class Bytes {
  size = 256;

  /** Return token ids. @param {string | Uint8Array} text */
  encode(text) {
    return Int32Array.from(asBytes(text));
  }

  /** Return the text's bytes. @param {ArrayLike<number>} tokens */
  decode(tokens) {
    return Uint8Array.from(checkIds(tokens, 256));
  }
}

/** A vocabulary of words in lines. */
export class Words {
  /** @type {Map<string, number>} */
  #ids;

  /** @param {{symbols: string[], unknown?: number | null, line_start?: number | null, line_end?: number | null, lower_case?: boolean, delimiter?: string | null}} fields */
  constructor({ symbols, unknown = null, line_start = null, line_end = null, lower_case = false, delimiter = null }) {
    this.symbols = symbols;
    this.size = symbols.length;
    this.unknown = unknown;
    this.lineStart = line_start;
    this.lineEnd = line_end;
    this.lowerCase = lower_case;
    this.delimiter = delimiter;
    this.#ids = new Map(symbols.map((symbol, id) => [symbol, id]));
  }

  /** Return token ids. @param {string | Uint8Array} text */
  encode(text) {
    /** @type {string} */
    let said;
    try {
      said = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(asBytes(text));
    } catch (error) {
      if (error instanceof UsageError) throw error;
      throw new UsageError(`the text is not UTF-8 (${oneLine(error)}), expected text; convert it first`);
    }
    const lines = said.split(/\r\n|\n|\r/);
    const ended = lines.at(-1) === "";
    if (ended) lines.pop();
    return Int32Array.from(lines.flatMap((line, at) => [
      ...(this.lineStart === null ? [] : [this.lineStart]),
      ...this.#split(line).map((word) => this.#id(word)),
      ...(this.lineEnd === null || (at === lines.length - 1 && !ended) ? [] : [this.lineEnd]), // a text that stops inside a line may go on
    ]));
  }

  /** Return the text's bytes; an id without a symbol becomes e.g. <50257>. @param {ArrayLike<number>} tokens */
  decode(tokens) {
    const between = this.delimiter ?? " ";
    const parts = checkIds(tokens, 2 ** 31).map((token) => (token === this.lineEnd ? "\n" : (this.symbols[token] ?? `<${token}>`) + between));
    return new TextEncoder().encode(parts.join(""));
  }

  /** @param {string} line */
  #split(line) {
    let text = line.replace(ENDS, "");
    if (this.lowerCase && !ASCII.test(text)) {
      throw new UnsupportedError(`the vocabulary is of lower case, and ${shown(brief(text))} is not ASCII, whose lower case in Python this runtime does not know; give token ids`);
    }
    if (this.lowerCase) text = text.toLowerCase();
    if (!text) return [];
    return this.delimiter === "" ? [...text] : text.split(this.delimiter ?? RUNS);
  }

  /** @param {string} word */
  #id(word) {
    const found = this.#ids.get(word) ?? this.unknown;
    if (found === null) throw new UsageError(`${shown(word)} is not among the ${this.size} words of the vocabulary, which has no unknown one; give a text of its words, or token ids`);
    return found;
  }
}

/**
 * Return the vocabulary of a file.
 * @param {Uint8Array} bytes
 * @param {number} vocabSize V
 * @param {string} where
 * @returns {Vocabulary}
 */
export function readVocabulary(bytes, vocabSize, where) {
  const refuse = (/** @type {string} */ said) => new BundleError(`${where}: ${said}`);
  /** @type {any} */
  let found;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    throw refuse(`${oneLine(error)}; expected a vocabulary; upgrade txl-runtime or export again`);
  }
  if (found?.kind === "bytes") {
    if (vocabSize !== 256) throw refuse(`a byte vocabulary has 256 ids, the model has ${vocabSize}; leave it out`);
    return new Bytes();
  }
  const { symbols, lower_case: lower = false, delimiter = null } = found ?? {};
  const special = [found?.unknown, found?.line_start, found?.line_end].filter((id) => id !== null && id !== undefined);
  const typed = Array.isArray(symbols) && symbols.length && symbols.every((symbol) => typeof symbol === "string") && typeof lower === "boolean" && (delimiter === null || typeof delimiter === "string");
  if (found?.kind !== "words" || !typed) throw refuse("no vocabulary of bytes or words; expected a vocabulary; upgrade txl-runtime or export again");
  if (symbols.length > vocabSize || !special.every((id) => isWhole(id) && id >= 0 && id < symbols.length)) {
    throw refuse(`${symbols.length} symbols and special ids ${shown(special)}, expected at most ${vocabSize} symbols and ids among them; export the model again`);
  }
  return new Words(found);
}

/** Decodes tokens that come one by one; holds back an incomplete character, and text that may begin a stop text. */
export class TextStream {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #held = "";
  stopped = false;

  /** @param {readonly string[]} stops texts that end it */
  constructor(stops) {
    this.stops = stops;
  }

  /** Take the bytes of a token, and return the text that is now certain. @param {Uint8Array} piece */
  feed(piece) {
    return this.stopped ? "" : this.#more(this.#decoder.decode(piece, { stream: true }), false);
  }

  /** Return the text that was held back. */
  finish() {
    return this.stopped ? "" : this.#more(this.#decoder.decode(), true);
  }

  /** @param {string} text @param {boolean} last */
  #more(text, last) {
    const held = this.#held + text;
    const found = this.stops.flatMap((stop) => (held.includes(stop) ? [[held.indexOf(stop) + stop.length, held.indexOf(stop)]] : []));
    if (found.length) {
      this.stopped = true;
      this.#held = "";
      return held.slice(0, found.sort(([end, start], [other, first]) => end - other || start - first)[0][1]); // the stop text that is complete first; of several at one place, the longest
    }
    const keep = last ? 0 : Math.max(0, ...this.stops.map((stop) => {
      let size = Math.min(stop.length - 1, held.length);
      while (size > 0 && !held.endsWith(stop.slice(0, size))) size -= 1;
      return size;
    }));
    this.#held = held.slice(held.length - keep);
    return held.slice(0, held.length - keep);
  }
}
