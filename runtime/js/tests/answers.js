// @ts-check
/** Answers requests of conformance/README.md with this runtime, in Node and in pages. */

import * as runtime from "../index.js";

const PROMISES = `padding idle last cut fill initial reset select snapshot rows limit commit lookahead lockstep grows open score
  greedy draws apart temperature top_k top_p clusters text selftest refusals int8 half old axes`.split(/\s+/);
const CODES = { float32: Float32Array, float16: Uint16Array, int32: Int32Array, bool: Uint8Array };

/** @typedef {Record<string, any>} Json */
/** @typedef {import("../index.js").NdArray} NdArray */

/** @param {Uint8Array} bytes */
export function packedBytes(bytes) {
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

/** @param {NdArray} array */
export function packed({ dtype, shape, data }) {
  return { dtype, shape, data: packedBytes(new Uint8Array(data.buffer, data.byteOffset, data.byteLength)) };
}

/** @param {any} text */
function unpackedBytes(text) {
  try {
    if (typeof text === "string") return Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  } catch {} // told below
  throw new runtime.UsageError(`bytes are ${text}, expected base64`);
}

/** @param {any} document @returns {NdArray} */
export function unpacked(document) {
  const { dtype, shape, data } = document ?? {};
  const bytes = unpackedBytes(data);
  const Kind = /** @type {any} */ (CODES)[dtype];
  const values = Kind && bytes.length % Kind.BYTES_PER_ELEMENT === 0 ? new Kind(bytes.buffer) : null;
  const sound = Array.isArray(shape) && shape.every((size) => Number.isSafeInteger(size) && size >= 0);
  if (!values || !sound || shape.reduce((all, size) => all * size, 1) !== values.length) throw new runtime.UsageError(`an array is ${dtype} ${shape} of ${bytes.length} bytes, expected one of ${Object.keys(CODES)} and as many`);
  return new runtime.NdArray(dtype, shape, values);
}

/** One model and one stream of it at a time; the method `do` answers a request. */
export class Driver {
  /** @type {import("../index.js").Model | null} */
  #model = null;
  /** @type {import("../index.js").Stream | null} */
  #stream = null;

  /** @param {any} ort @param {string} version of txl-runtime */
  constructor(ort, version) {
    this.ort = ort;
    this.version = version;
    this.node = ort.env.versions.node !== undefined;
  }

  get model() {
    if (this.#model === null) throw new runtime.UsageError("no model is loaded, expected load before anything else");
    return this.#model;
  }

  get stream() {
    if (this.#stream === null) throw new runtime.UsageError("no stream is open, expected open before anything that has a state");
    return this.#stream;
  }

  /** @param {Json} request @returns {Promise<Json>} */
  async answer(request) {
    const work = /** @type {any} */ (this)[`do_${request?.do}`];
    try {
      if (work === undefined) throw new runtime.UnsupportedError(`a request is to do ${request?.do}, expected one that the protocol has`);
      return { ok: (await work.call(this, request)) ?? {} };
    } catch (error) {
      if (!(error instanceof runtime.TxlError)) throw error;
      const kinds = /** @type {const} */ ([[runtime.BundleError, "bundle"], [runtime.BackendError, "backend"], [runtime.UnsupportedError, "unsupported"]]);
      return { refused: error.message, kind: kinds.find(([kind]) => error instanceof kind)?.[1] ?? "usage" };
    }
  }

  do_hello() {
    const { node, web } = this.ort.env.versions;
    return { name: "txl-runtime", version: this.version, engine: `ONNX Runtime ${node ?? web}`, supports: [...PROMISES, ...(this.node ? ["spill"] : [])] };
  }

  /** @param {Json} request */
  async do_load({ path, update }) {
    await this.#model?.close();
    this.#model = this.#stream = null;
    this.#model = await runtime.load(path, { ort: this.ort, threads: 1, update });
    return { update: this.#model.update };
  }

  /** @param {Json} request */
  do_open({ b, memory_length: rows }) {
    this.#stream = this.model.stream(b, rows);
  }

  /** @param {Json} request */
  async do_run({ inputs, counts, commit }) {
    return named(await this.stream.run(arraysOf(inputs), { lengths: counts, commit }));
  }

  /** @param {Json} request */
  async do_feed({ inputs, counts, last }) {
    return named(await this.stream.feed(arraysOf(inputs), { lengths: counts, last }));
  }

  /** @param {Json} request */
  async do_score({ tokens, counts }) {
    return { nll: packed(await this.stream.score(unpacked(tokens), { lengths: counts })) };
  }

  /** @param {Json} request */
  async do_generate({ tokens, counts, count, temperature, top_k: topK, top_p: topP, seed }) {
    if (count === 0) throw new runtime.UsageError("count is 0, expected at least 1; ask for a token");
    const drawn = this.stream.generate(unpacked(tokens), count, { lengths: counts, temperature, topK, topP, seed, logprobs: true });
    const [ids, logprobs] = [/** @type {number[]} */ ([]), /** @type {number[]} */ ([])];
    for await (const token of drawn) {
      ids.push(...token);
      logprobs.push(.../** @type {Float32Array} */ (drawn.logprobs));
    }
    const shape = [ids.length / this.stream.batchSize, this.stream.batchSize];
    return { tokens: packed(new runtime.NdArray("int32", shape, Int32Array.from(ids))), logprobs: packed(new runtime.NdArray("float32", shape, Float32Array.from(logprobs))) };
  }

  /** @param {Json} request */
  do_reset({ rows }) {
    this.stream.reset(rows);
  }

  /** @param {Json} request */
  do_select({ rows }) {
    this.stream.select(rows);
  }

  do_save() {
    return { bytes: packedBytes(this.stream.snapshot().toBytes()) };
  }

  /** @param {Json} request */
  do_restore({ bytes }) {
    this.stream.restore(runtime.StreamState.fromBytes(unpackedBytes(bytes)));
  }

  /** @param {Json} request */
  do_take({ row }) {
    return { bytes: packedBytes(this.stream.take(row).toBytes()) };
  }

  /** @param {Json} request */
  do_put({ row, bytes }) {
    this.stream.put(row, runtime.StreamState.fromBytes(unpackedBytes(bytes)));
  }

  do_state() {
    const states = Object.fromEntries(Object.entries(this.stream.state()).map(([name, array]) => [name, packed(array)]));
    return { states, fill: [...this.stream.fill] };
  }

  /** @param {Json} request */
  do_encode({ bytes }) {
    const ids = this.#vocabulary().encode(unpackedBytes(bytes));
    return { tokens: packed(new runtime.NdArray("int32", [ids.length], ids)) };
  }

  /** @param {Json} request */
  do_decode({ tokens }) {
    return { bytes: packedBytes(this.#vocabulary().decode(unpacked(tokens).data)) };
  }

  async do_selftest() {
    return { passed: (await this.model.selftest()).passed };
  }

  #vocabulary() {
    if (this.model.vocabulary === null) throw new runtime.UsageError("the bundle has no vocabulary, expected one to turn text into ids");
    return this.model.vocabulary;
  }
}

/** @param {any} documents */
function arraysOf(documents) {
  if (documents === null || typeof documents !== "object") throw new runtime.UsageError(`inputs are ${documents}, expected arrays by name`);
  return Object.fromEntries(Object.entries(documents).map(([name, document]) => [name, unpacked(document)]));
}

/** @param {Record<string, NdArray>} outputs */
function named(outputs) {
  return { outputs: Object.fromEntries(Object.entries(outputs).map(([name, array]) => [name, packed(array)])) };
}

/** Return a request; a seed that floating point does not hold becomes a BigInt. @param {string} line */
export function requestOf(line) {
  try {
    const request = JSON.parse(line.replace(/("seed"\s*:\s*)(\d{16,})/, '$1"$2"'));
    if (typeof request.seed === "string") request.seed = BigInt(request.seed);
    return request;
  } catch {
    return null;
  }
}
