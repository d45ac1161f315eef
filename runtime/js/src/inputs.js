// @ts-check
/** Checks a stream's arguments before anything is computed, and cuts positions into segments. */

import { NdArray, alike, asArray, clearBlock, count, isInteger } from "./arrays.js";
import { UsageError, few, isWhole, listed, shown } from "./errors.js";

/** @typedef {import("./manifest.js").Manifest} Manifest */
/** @typedef {import("./manifest.js").Axes} Axes */
/** @typedef {{first: number, end: number, counts: Int32Array}} Cut one segment of what is fed */

/** Return counts [b], each 0 … most; all are `most` without lengths. @param {any} lengths @param {number} b @param {number} most */
export function checkLengths(lengths, b, most) {
  if (lengths === undefined || lengths === null) return new Int32Array(b).fill(most);
  const given = Array.isArray(lengths) || ArrayBuffer.isView(lengths) ? Array.from(/** @type {any} */ (lengths)) : null;
  if (given === null || given.length !== b || !given.every((length) => isWhole(length) && length >= 0 && length <= most)) {
    throw new UsageError(`lengths are ${shown(lengths)}, expected ${b} whole numbers of 0 … ${most}; 0 leaves a stream idle`);
  }
  return Int32Array.from(given);
}

/** Return indices of sequences. @param {any} rows @param {number} b @returns {number[]} */
export function checkRows(rows, b) {
  const given = Array.isArray(rows) || ArrayBuffer.isView(rows) ? Array.from(/** @type {any} */ (rows)) : null;
  if (given !== null && given.length === b && given.every((row) => typeof row === "boolean")) return given.flatMap((row, at) => (row ? [at] : []));
  if (given === null || !given.every((row) => isWhole(row) && row >= 0 && row < b)) throw new UsageError(`rows are ${shown(rows)}, expected indices of streams, 0 … ${b - 1}`);
  return given;
}

/** Return listed token ids. @param {any} given @param {number} vocabSize @param {string} what @returns {number[]} */
export function checkListed(given, vocabSize, what) {
  const found = typeof given?.[Symbol.iterator] === "function" && typeof given !== "string" ? [...given] : null;
  if (found === null || !found.every((id) => isWhole(id) && id >= 0 && id < vocabSize)) throw new UsageError(`${what} is ${shown(given)}, expected a list of ids, 0 … ${vocabSize - 1} each`);
  return found;
}

/**
 * Set positions that do not count to 0: those after count + ahead of each sequence, and all of an idle one.
 * @param {Axes} axes
 * @param {NdArray} array of as many sequences as there are counts; it is changed
 * @param {Int32Array} counts
 */
export function clearUncounted(axes, array, counts) {
  if (axes.batch < 0) return array;
  counts.forEach((own, row) => {
    const end = own ? own + axes.ahead : 0;
    const at = array.shape.map((_, axis) => (axis === axes.batch ? row : 0));
    const size = array.shape.map((all, axis) => (axis === axes.batch ? 1 : all));
    if (!axes.positions.length) return end ? undefined : clearBlock(array, at, size);
    for (const axis of axes.positions) if (end < size[axis]) clearBlock(array, at.with(axis, end), size.with(axis, size[axis] - end));
  });
  return array;
}

/**
 * Return arrays by name in the table's types, zero beyond lengths; counts [b]; and T.
 * @param {any} inputs
 * @param {any} lengths
 * @param {Manifest} manifest
 * @param {number} b
 * @returns {{arrays: Map<string, NdArray>, counts: Int32Array, columns: number}}
 */
export function checkInputs(inputs, lengths, manifest, b) {
  const table = manifest.given;
  const described = () => table.map((entry) => `${entry.name} ${entry.dtype} [${entry.shape.join(", ")}]`).join(", ") || "none";
  if (inputs === null || typeof inputs !== "object" || Array.isArray(inputs)) throw new UsageError(`inputs are ${shown(inputs)}, expected an object of arrays, ${described()}`);
  const odd = Object.keys(inputs).find((name) => !table.some((entry) => entry.name === name));
  if (odd !== undefined) throw new UsageError(`inputs hold ${shown(odd)}, expected ${described()}; take it out`);
  let columns = /** @type {number | null} */ (null);
  const arrays = /** @type {Map<string, NdArray>} */ (new Map());
  for (const entry of table) {
    if (!Object.hasOwn(inputs, entry.name)) throw new UsageError(`inputs lack ${entry.name}, expected ${described()}; add it`);
    const { axes } = entry;
    const array = asArray(inputs[entry.name], entry.name);
    const isGood = entry.dtype === "bool" ? array.dtype === "bool" : array.dtype !== "bool" && (entry.dtype !== "int32" || isInteger(array) || !count(array.shape));
    if (!isGood) throw new UsageError(`${entry.name} is ${array.dtype}, expected ${entry.dtype}; convert it`);
    if (columns === null && axes.positions.length && axes.positions[0] < array.shape.length) columns = array.shape[axes.positions[0]] - axes.ahead;
    if (!alike(array.shape, axes.sizes(b, columns ?? 0)) || (axes.positions.length && (columns ?? 0) < 1)) {
      const length = columns === null || columns < 1 ? "T" : columns;
      const sizes = entry.shape.map((size) => (size === "B" ? b : size === "L" ? (axes.ahead ? `${length} + ${axes.ahead}` : length) : size));
      const todo = axes.positions.length ? ", with the same T of at least 1 in all inputs" : `; the stream has ${b} sequences, model.stream(b) opens others`;
      throw new UsageError(`${entry.name} has shape ${shown(array.shape)}, expected [${sizes.join(", ")}]${todo}`);
    }
    arrays.set(entry.name, array);
  }
  const counts = checkLengths(lengths, b, columns ?? 1);
  for (const entry of table) {
    let array = /** @type {NdArray} */ (arrays.get(entry.name));
    const isWide = entry.dtype === "int32" && array.data.some((value) => value < -(2 ** 31) || value >= 2 ** 31);
    if (isWide) throw new UsageError(`${entry.name} holds ${Math.min(...array.data.slice(0, 1000))} and others, expected values of int32`);
    array = array.as(entry.dtype);
    if (counts.some((own) => own < (columns ?? 1))) array = clearUncounted(entry.axes, array.copy(), counts);
    if (entry.vocab !== null) checkIds(array, entry.vocab, entry.name);
    arrays.set(entry.name, array);
  }
  return { arrays, counts, columns: columns ?? 1 };
}

/** Refuse ids that are not of the vocabulary. @param {NdArray} ids @param {number} vocabSize @param {string} what */
function checkIds(ids, vocabSize, what) {
  const at = ids.data.findIndex((/** @type {number} */ id) => id < 0 || id >= vocabSize);
  if (at < 0) return;
  const place = ids.shape.map((size, axis) => Math.floor(at / count(ids.shape.slice(axis + 1))) % size);
  throw new UsageError(`${what} hold id ${ids.data[at]} at ${shown(place)}, expected 0 … ${vocabSize - 1}; check the vocabulary the ids come from`);
}

/**
 * Return tokens as int32 [b, T], zero beyond lengths, and counts [b].
 * @param {any} tokens
 * @param {any} lengths
 * @param {Manifest} manifest
 * @param {number} b
 * @param {string} what
 */
export function checkTokens(tokens, lengths, manifest, b, what) {
  const found = asArray(tokens, what);
  if (!isInteger(found) && count(found.shape)) throw new UsageError(`${what} are ${found.dtype}, expected whole numbers; encode text with model.vocabulary.encode`);
  if (found.shape.length !== 2 || found.shape[0] !== b || found.shape[1] < 1) throw new UsageError(`${what} have shape ${shown(found.shape)}, expected [${b}, T] with T at least 1; one row per stream`);
  const counts = checkLengths(lengths, b, found.shape[1]);
  const ids = NdArray.zeros("int64", found.shape);
  counts.forEach((own, row) => ids.data.set(found.row(row).data.subarray(0, own), row * found.shape[1]));
  checkIds(ids, manifest.vocabSize, what);
  return { ids: ids.as("int32"), counts };
}

/** Refuse an operation on tokens that the model does not support. @param {Manifest} manifest @param {string} what */
export function requireTokens(manifest, what) {
  const { tokens, logprobs } = manifest;
  const instead = "use run({...}) or feed({...}) with arrays by name";
  const named = (/** @type {{name: string, role: string}[]} */ rows) => rows.map((row) => `${row.name} (${row.role})`).join(", ") || "nothing";
  if (tokens === null) throw new UsageError(`${what} takes token ids alone, but this model reads ${named(manifest.given)}; ${instead}`);
  if (logprobs === null) throw new UsageError(`${what} needs log-probabilities, but this model returns ${named(manifest.outputs)}, expected an output of role logprobs; ${instead}`);
  if (!manifest.feedsTokens) {
    throw new UsageError(`${what} takes tokens one by one, but this model reads ${shown(tokens.shape)} with a look-ahead of ${tokens.lookahead} and returns ${shown(logprobs.shape)}; ${instead}`);
  }
  if (what !== "feed" && !manifest.byRows) {
    throw new UsageError(`${what} needs a state after every token, but this model's is that of whole segments of ${listed(manifest.segmentLengths)}; use run({...}, { commit: false }) to look into a segment and feed for whole ones`);
  }
}

/** Refuse a segment that the model cannot run. @param {number} columns @param {Int32Array} counts @param {Manifest} manifest */
export function checkSegment(columns, counts, manifest) {
  const known = manifest.segmentLengths;
  if (manifest.exact && !known.includes(columns)) {
    throw new UsageError(`inputs have ${columns} positions, expected ${listed(known)}, because this model takes whole segments alone; use feed for several, or export with another --segment-length`);
  }
  if (!manifest.exact && columns > known[0]) throw new UsageError(`inputs have ${columns} positions, expected at most one segment of ${known[0]}; use feed for more`);
  if (manifest.exact) checkWhole(counts, [0, columns]);
  checkLockstep(counts, manifest);
}

/**
 * Cut positions into segments, and leave out those in which nothing counts.
 * @param {number} columns T
 * @param {Int32Array} counts
 * @param {Manifest} manifest
 * @returns {Cut[]}
 */
export function cutsOf(columns, counts, manifest) {
  const [known, edges] = [manifest.segmentLengths, [0]];
  for (let at = 0; at < columns; edges.push(at)) {
    const rest = columns - at;
    const size = manifest.exact ? known.find((length) => length <= rest) : Math.min(rest, known[0]);
    if (size === undefined) throw new UsageError(`there are ${columns} positions (look-ahead aside), of which ${rest} remain after segments, expected what segments of ${listed(known)} add up to; give more or fewer`);
    at += size;
  }
  if (manifest.exact) checkWhole(counts, edges);
  const cuts = edges.slice(1).map((end, at) => ({ first: edges[at], end, counts: counts.map((own) => Math.min(Math.max(own - edges[at], 0), end - edges[at])) })).filter((cut) => cut.counts.some(Boolean));
  for (const cut of cuts) checkLockstep(cut.counts, manifest);
  return cuts;
}

/** @param {Int32Array} counts @param {number[]} edges */
function checkWhole(counts, edges) {
  if (counts.every((own) => edges.includes(own))) return;
  throw new UsageError(`lengths are ${few(counts)}, expected ${listed(edges)} each, because this model takes whole segments alone; sequences of other lengths need calls of their own`);
}

/** @param {Int32Array} counts @param {Manifest} manifest */
function checkLockstep(counts, manifest) {
  if (!manifest.lockstep || counts.every(Boolean) || !counts.some(Boolean)) return;
  throw new UsageError(`lengths are ${few(counts)} within a segment, expected all sequences to run or none, because this model's sequences run in lockstep; give all of them the same length, or open a stream for each`);
}
