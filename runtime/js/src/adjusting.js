// @ts-check
/** Adjustment of log-probabilities before a draw: forbidden tokens, a grammar's allowed ones, biases, any function. */

import { TxlError, UsageError, oneLine, shown } from "./errors.js";
import { checkListed } from "./inputs.js";

/**
 * A function of one sequence's whole row [V], which it may change, and of its tokens so far, those of the prompt first; it
 * returns the row to draw from, with -Infinity for a token that is never drawn.
 * @typedef {(row: Float64Array, tokens: Int32Array) => Float64Array | Float32Array} Adjust
 */
/** @typedef {Iterable<number> | ((tokens: Int32Array) => Iterable<number>)} Allow */

const MOST_BIAS = 100;

/**
 * Return one function that does all of this, in this order: adjust, logitBias, allow, forbid; null if nothing is asked.
 * @param {number} vocabSize V
 * @param {{adjust?: Adjust | null, logitBias?: Map<number, number> | Record<number, number> | null, allow?: Allow | null, forbid?: Iterable<number>}} options
 * @returns {Adjust | null}
 */
export function adjustment(vocabSize, { adjust = null, logitBias = null, allow = null, forbid = [] }) {
  if (adjust !== null && typeof adjust !== "function") throw new UsageError(`adjust is ${shown(adjust)}, expected a function of a row and of tokens, or null`);
  const biases = checkBias(logitBias, vocabSize);
  const barred = new Uint8Array(vocabSize);
  const grammar = typeof allow === "function" ? allow : null;
  if (allow !== null && grammar === null) {
    barred.fill(1);
    for (const id of checkListed(allow, vocabSize, "allow")) barred[id] = 0;
  }
  for (const id of checkListed(forbid, vocabSize, "forbid")) barred[id] = 1;
  if (barred.every(Boolean)) throw new UsageError(`allow is ${shown(allow)} and forbid ${shown(forbid)}, expected at least one of ${vocabSize} tokens left to draw; allow more or forbid fewer`);
  if (adjust === null && grammar === null && !biases.length && !barred.some(Boolean)) return null;
  return (given, tokens) => {
    const row = adjust === null ? given : called(adjust, given, tokens);
    for (const [id, bias] of biases) row[id] += bias;
    if (grammar !== null) {
      const kept = new Set(checkListed(asked("allow", () => grammar(tokens), tokens), vocabSize, "what allow returned"));
      for (let id = 0; id < row.length; id += 1) if (!kept.has(id)) row[id] = -Infinity;
    }
    for (let id = 0; id < row.length; id += 1) if (barred[id]) row[id] = -Infinity;
    return row;
  };
}

/**
 * Return a copy of the row that a function returns, after checking it.
 * @param {Adjust} adjust
 * @param {Float64Array} row
 * @param {Int32Array} tokens
 */
export function called(adjust, row, tokens) {
  const given = asked("adjust", () => adjust(row, tokens), tokens);
  if (!(given instanceof Float64Array || given instanceof Float32Array) || given.length !== row.length) {
    throw new UsageError(`adjust returned ${shown(given)}, expected a Float64Array or Float32Array of ${row.length}, a log-probability for each token; return the row that it was given, changed`);
  }
  const odd = given.findIndex((value) => !(value < Infinity));
  if (odd >= 0) throw new UsageError(`adjust returned ${given[odd]} for token ${odd}, expected a number, or -Infinity for a token that is never drawn`);
  if (given.every((value) => value === -Infinity)) {
    throw new UsageError(`no token may be drawn after ${tokens.length} tokens: all log-probabilities are -Infinity, expected at least one that is not; let allow, forbid and adjust leave one`);
  }
  return Float64Array.from(given);
}

/** Return what a caller's function returns. @param {string} what @param {() => any} call @param {Int32Array} tokens */
function asked(what, call, tokens) {
  try {
    return call();
  } catch (error) {
    if (error instanceof TxlError) throw error;
    throw new UsageError(`${what} failed after ${tokens.length} tokens (${oneLine(error)}), expected a result; mend it`);
  }
}

/** @param {any} given @param {number} vocabSize @returns {[number, number][]} */
function checkBias(given, vocabSize) {
  if (given === null) return [];
  if (typeof given !== "object" || Array.isArray(given)) throw new UsageError(`logitBias is ${shown(given)}, expected numbers by token id, such as {17: -100}`);
  const pairs = given instanceof Map ? [...given] : Object.entries(given).map(([id, bias]) => [/^\d+$/.test(id) ? Number(id) : NaN, bias]);
  checkListed(pairs.map(([id]) => id), vocabSize, "logitBias");
  for (const [id, bias] of pairs) {
    if (typeof bias !== "number" || !(Math.abs(bias) <= MOST_BIAS)) throw new UsageError(`logitBias is ${shown(bias)} for token ${id}, expected a number, -${MOST_BIAS} … ${MOST_BIAS}`);
  }
  return /** @type {[number, number][]} */ (pairs);
}
