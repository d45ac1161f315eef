// @ts-check
/** Drawing the next token: NumPy's generator of random numbers, and temperature, top-k and top-p in its order. */

import { called } from "./adjusting.js";
import { BackendError, UsageError, isWhole, shown } from "./errors.js";

/** @typedef {import("./adjusting.js").Adjust} Adjust */

const FEW = 1024; // best tokens that are sorted first for top-p: mostly the nucleus is among them
const [MASK64, MASK128] = [(1n << 64n) - 1n, (1n << 128n) - 1n];
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/** NumPy's PCG64, seeded with `SeedSequence(seed, spawn_key=(row,))`. */
export class Random {
  #state;
  #increment;

  /** @param {bigint} seed @param {number} row */
  constructor(seed, row) {
    const words = /** @type {number[]} */ ([]);
    for (let rest = seed; rest > 0n || words.length < 4; rest >>= 32n) words.push(Number(rest & 0xffffffffn));
    words.push(row);
    let a = 0x43b0d7e5;
    const hash = (/** @type {number} */ value) => {
      let mixed = value ^ a;
      a = Math.imul(a, 0x931e8875);
      mixed = Math.imul(mixed, a);
      return (mixed ^ (mixed >>> 16)) >>> 0;
    };
    const mix = (/** @type {number} */ x, /** @type {number} */ y) => {
      const mixed = Math.imul(x, 0xca01f9dd) - Math.imul(y, 0x4973f715);
      return (mixed ^ ((mixed >>> 0) >>> 16)) >>> 0;
    };
    const pool = words.slice(0, 4).map(hash);
    for (let from = 0; from < 4; from += 1) for (let to = 0; to < 4; to += 1) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
    for (const word of words.slice(4)) for (let to = 0; to < 4; to += 1) pool[to] = mix(pool[to], hash(word));
    let c = 0x8b51f9dd;
    const out = Array.from({ length: 8 }, (_, at) => {
      let value = pool[at % 4] ^ c;
      c = Math.imul(c, 0x58f38ded);
      value = Math.imul(value, c);
      return BigInt((value ^ (value >>> 16)) >>> 0);
    });
    const q = [0, 1, 2, 3].map((at) => out[2 * at] | (out[2 * at + 1] << 32n));
    this.#increment = ((((q[2] << 64n) | q[3]) << 1n) | 1n) & MASK128;
    this.#state = ((this.#increment + ((q[0] << 64n) | q[1])) * MULTIPLIER + this.#increment) & MASK128;
  }

  /** Return the next number in [0, 1). */
  next() {
    this.#state = (this.#state * MULTIPLIER + this.#increment) & MASK128;
    const x = (this.#state >> 64n) ^ (this.#state & MASK64);
    const turn = this.#state >> 122n;
    const turned = ((x >> turn) | (x << (64n - turn))) & MASK64;
    return Number(turned >> 11n) / 2 ** 53;
  }
}

/** A sampler of one sequence's tokens, with random numbers of its own. */
export class Sampler {
  #random;
  #past;

  /**
   * @param {{temperature?: number, topK?: number | null, topP?: number | null, seed?: number | bigint | null}} options
   * @param {number} row place of the sequence in its stream
   * @param {Adjust | null} adjust
   * @param {Int32Array} prompt
   */
  constructor({ temperature = 1, topK = null, topP = null, seed = null }, row, adjust, prompt) {
    if (typeof temperature !== "number" || !(temperature >= 0 && temperature < Infinity)) throw new UsageError(`temperature is ${shown(temperature)}, expected a number of at least 0; 0 is greedy`);
    if (topK !== null && (!isWhole(topK) || topK < 1)) throw new UsageError(`topK is ${shown(topK)}, expected a whole number of at least 1, or null to keep every token`);
    if (topP !== null && !(typeof topP === "number" && topP > 0 && topP <= 1)) throw new UsageError(`topP is ${shown(topP)}, expected more than 0 and at most 1, or null to keep every token`);
    if (seed !== null && ((!isWhole(seed) && typeof seed !== "bigint") || seed < 0)) throw new UsageError(`seed is ${shown(seed)}, expected a whole number of at least 0 (a BigInt from 2**53 on), or null for a fresh one`);
    this.temperature = temperature;
    this.topK = topK;
    this.topP = topP;
    this.row = row;
    this.adjust = adjust;
    this.#random = new Random(seed === null ? freshSeed() : BigInt(seed), row);
    this.#past = Array.from(prompt);
  }

  /**
   * Return the next token.
   * @param {Float32Array} logprobs [V]
   * @throws {BackendError} there is NaN among them
   * @throws {UsageError} `adjust` failed or left nothing to draw; no random number was used
   */
  draw(logprobs) {
    if (logprobs.some(Number.isNaN)) throw new BackendError(`stream ${this.row} produced NaN, expected log-probabilities; reset the stream`);
    const row = this.adjust === null ? logprobs : called(this.adjust, Float64Array.from(logprobs), Int32Array.from(this.#past));
    const token = this.#drawn(row);
    if (this.adjust !== null) this.#past.push(token);
    return token;
  }

  /** @param {Float32Array | Float64Array} row */
  #drawn(row) {
    let best = 0;
    for (let id = 1; id < row.length; id += 1) if (row[id] > row[best]) best = id;
    if (this.temperature === 0) return best;
    const weight = (/** @type {number} */ id) => Math.exp((row[id] - row[best]) / this.temperature);
    const summed = (/** @type {Uint32Array | null} */ ids) => {
      const sums = new Float64Array(ids?.length ?? row.length);
      let sum = 0;
      for (let at = 0; at < sums.length; at += 1) sums[at] = sum += weight(ids ? ids[at] : at);
      return sums;
    };
    const { topK, topP } = this;
    let ids = topK === null && topP === null ? null : largest(row, topK ?? FEW);
    let sums = summed(ids);
    let kept = sums.length;
    if (topP !== null) {
      const all = topK === null ? summed(null) : sums;
      const share = topP * all[all.length - 1];
      if (topK === null && sums[kept - 1] < share) sums = summed((ids = largest(row, row.length)));
      kept = 1;
      while (kept < sums.length && sums[kept - 1] < share) kept += 1;
    }
    const at = Math.min(placeOf(sums.subarray(0, kept), this.#random.next() * sums[kept - 1]), kept - 1);
    return ids ? ids[at] : at;
  }
}

/** Return the ids of the `most` largest values, the largest first; of equal ones the lower id is first. @param {Float32Array | Float64Array} row @param {number} most */
function largest(row, most) {
  const least = most < row.length ? row.slice().sort()[row.length - most] : -Infinity;
  const ids = /** @type {number[]} */ ([]);
  for (let id = 0; id < row.length; id += 1) if (row[id] >= least) ids.push(id);
  return Uint32Array.from(ids.sort((one, other) => row[other] - row[one] || one - other).slice(0, most));
}

/** Return the index of the first sum that is larger. @param {Float64Array} sums ascending @param {number} value */
function placeOf(sums, value) {
  let [low, high] = [0, sums.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sums[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(4)).reduce((seed, word) => (seed << 32n) | BigInt(word), 0n);
}
