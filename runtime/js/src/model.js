// @ts-check
/** Models: a bundle whose files were checked and whose programs are open. */

import { NdArray, alike, without } from "./arrays.js";
import { Engine, importOrt } from "./engine.js";
import { BackendError, BundleError, UnsupportedError, UsageError, checkOptions, isWhole, oneLine, shown } from "./errors.js";
import { counted, readManifest } from "./manifest.js";
import { pickTensors } from "./safetensors.js";
import { runSelftest } from "./selftest.js";
import { readChecked, sourceOf } from "./sources.js";
import { Stream } from "./stream.js";
import { readVocabulary } from "./vocabulary.js";

/** @typedef {import("./manifest.js").Manifest} Manifest */
/** @typedef {import("./sources.js").Source} Source */
/** @typedef {{ort?: any, threads?: number, verifyFiles?: boolean, update?: string | null, backend?: string}} LoadOptions */

const NAMES = ["ort", "threads", "verifyFiles", "update", "backend"];

/**
 * Load a bundle.
 *
 * Of a folder in Node all files that the manifest lists, but engines, are compared with it; else only those that are used.
 * @param {string | URL | import("./sources.js").Files} given the path (Node) or URL of its folder, or its files by name
 * @param {LoadOptions} [options]
 *   ort: the module onnxruntime-web or onnxruntime-node; without it, it is imported by its name.
 *   threads: the engine's threads in Node; a page sets `ort.env.wasm.numThreads`.
 *   verifyFiles: whether to compare every file's SHA-256; sizes always are.
 *   update: ring (Node alone) or rolled; without it, the best that the engine runs.
 *   backend: cpu, or webgpu with onnxruntime-web/webgpu, of which nothing was measured.
 * @returns {Promise<Model>}
 * @throws {BundleError} the bundle is missing, altered, inconsistent or too new
 * @throws {BackendError} the engine is missing, or cannot run the bundle
 * @throws {UsageError} the bundle has no programs of that update rule
 */
export async function load(given, options = {}) {
  checkOptions("load", options, NAMES);
  const { verifyFiles = true, update = null } = options;
  if (typeof verifyFiles !== "boolean") throw new UsageError(`verifyFiles is ${shown(verifyFiles)}, expected true or false`);
  const source = await sourceOf(given);
  const manifest = readManifest(await source.read("manifest.json", 1 << 24), source.where("manifest.json"));
  if (update !== null && !manifest.updates.includes(update)) throw new UsageError(`update is ${shown(update)}, this bundle has programs for ${manifest.updates.join(", ")}; use one`);
  const engine = new Engine(options.ort ?? (await importOrt()), options);
  const rule = update ?? manifest.updates.find((name) => name !== "ring" || engine.inPlace);
  if (rule === undefined || (rule === "ring" && !engine.inPlace)) {
    const what = `a ring is written in place, which ${engine.description} cannot do`;
    if (update !== null) throw new UnsupportedError(`update is ring, and ${what}; use rolled`);
    throw new BackendError(`${source.where("manifest.json")}: this bundle has memory in a ring alone, and ${what}, expected programs of rolled memory; export the model again with these`);
  }
  const segments = manifest.programs.filter((program) => program.update === rule);
  const softmax = segments[0].kind === "hidden" ? manifest.programs.filter((program) => program.update === "none") : [];
  const read = (/** @type {string} */ name) => readChecked(source, name, manifest.files[name], verifyFiles);
  const wanted = new Set([manifest.weights, ...(manifest.vocabulary ? [manifest.vocabulary] : []), ...[...segments, ...softmax].map((program) => program.file)]);
  const held = /** @type {Map<string, Uint8Array>} */ (new Map());
  for (const name of Object.keys(manifest.files)) {
    if (wanted.has(name)) held.set(name, await read(name));
    else if (source.local && (!name.startsWith("engines/") || manifest.usedFiles.has(name))) await read(name);
  }
  const of = (/** @type {string} */ name) => /** @type {Uint8Array} */ (held.get(name));
  for (const program of [...segments, ...softmax]) await engine.open(program, source.where(program.file), async () => of(program.file), { path: manifest.weights, data: of(manifest.weights) });
  const initial = initialValues(manifest, of(manifest.weights), source.where(manifest.weights));
  const vocabulary = manifest.vocabulary ? readVocabulary(of(manifest.vocabulary), manifest.vocabSize, source.where(manifest.vocabulary)) : null;
  return new Model(manifest, engine, rule, initial, vocabulary, read, source);
}

/**
 * Return the first value of each state in its own type: one memory row of one sequence, or one sequence's part; of zeros null.
 * @param {Manifest} manifest
 * @param {Uint8Array} weights
 * @param {string} where
 * @returns {Map<string, NdArray | null>} by the states' names
 */
function initialValues(manifest, weights, where) {
  /** @type {Map<string, NdArray>} */
  let stored;
  try {
    stored = pickTensors(weights, new Set(manifest.states.flatMap(({ initial }) => (typeof initial === "string" ? [initial] : []))));
  } catch (error) {
    throw new BundleError(`${where}: ${oneLine(error)}; expected the bundle's weights; export the model again`);
  }
  return new Map(manifest.states.map((state) => {
    const shape = without(state.shape, state.batch_axis, counted(state) ? state.row_axis : null);
    const start = state.rows ? state.shape.map((size, axis) => (axis === state.row_axis ? state.rows?.[0] ?? 0 : size)) : state.shape;
    const first = counted(state) ? shape : without(start, state.batch_axis);
    if (state.initial === null || state.initial === 0 || first.includes(0)) return [state.name, null];
    if (typeof state.initial === "number") return [state.name, new NdArray("float64", [], Float64Array.of(state.initial)).as(state.dtype).spread(first)];
    const found = /** @type {NdArray} */ (stored.get(state.initial));
    const ending = first.slice(Math.max(0, first.length - found.shape.length));
    const fits = counted(state) ? alike(found.shape, shape) : found.shape.length <= first.length && found.shape.every((size, axis) => size === 1 || size === ending[axis]);
    if (found.dtype !== (counted(state) ? "float32" : state.dtype) || !fits) {
      throw new BundleError(`${where}: ${state.initial} is ${found.dtype} ${shown(found.shape)}, expected ${shown(first)} for ${state.name}; export the model again`);
    }
    return [state.name, found.as(state.dtype).spread(first)];
  }));
}

/** An open bundle; `load` returns one. */
export class Model {
  #read;

  /**
   * @param {Manifest} manifest
   * @param {Engine} engine
   * @param {string} update
   * @param {Map<string, NdArray | null>} initial
   * @param {import("./vocabulary.js").Vocabulary | null} vocabulary
   * @param {(name: string) => Promise<Uint8Array>} read a file that the manifest lists
   * @param {Source} source
   */
  constructor(manifest, engine, update, initial, vocabulary, read, source) {
    this.manifest = manifest;
    this.engine = engine;
    /** The update rule of its memory. */
    this.update = update;
    /** The converter of text to token ids, or null. */
    this.vocabulary = vocabulary;
    this.initial = initial;
    this.where = source.where;
    this.#read = read;
  }

  /** V; null for a model without tokens. */
  get vocabSize() {
    return this.manifest.vocabSize || null;
  }

  /** M, the most memory rows per layer; null for a model without. */
  get memoryLength() {
    return this.manifest.countsRows ? this.manifest.memoryLength : null;
  }

  /** B, the most sequences of a stream. */
  get batchSize() {
    return this.manifest.batchSize;
  }

  /** L of all programs of segments, the largest first. */
  get segmentLengths() {
    return this.manifest.segmentLengths;
  }

  /**
   * Open a stream of fresh sequences.
   * @param {number} [batchSize] b; without it, B
   * @param {number | null} [memoryLength] most memory rows that a sequence keeps; null for M
   */
  stream(batchSize = this.batchSize, memoryLength = null) {
    const { manifest } = this;
    if (!isWhole(batchSize) || batchSize < 1 || batchSize > manifest.batchSize) throw new UsageError(`batchSize is ${shown(batchSize)}, expected 1 … ${manifest.batchSize}; export with --batch-size for more sequences`);
    if (manifest.joint && batchSize < manifest.batchSize) throw new UsageError(`batchSize is ${batchSize}, expected ${manifest.batchSize}, because this model's sequences influence one another`);
    if (memoryLength !== null && !manifest.countsRows) throw new UsageError(`memoryLength is ${shown(memoryLength)}, but this model counts no memory rows; leave it out, and reset the state where it is to forget`);
    if (memoryLength !== null && (!isWhole(memoryLength) || memoryLength < 0 || memoryLength > manifest.memoryLength)) {
      throw new UsageError(`memoryLength is ${shown(memoryLength)}, expected 0 … ${manifest.memoryLength}; export with --memory-length for more`);
    }
    return new Stream(this, batchSize, memoryLength ?? manifest.memoryLength);
  }

  /** Replay the bundle's stored vectors: whether it computes here what the original model did. */
  async selftest() {
    const name = this.manifest.selftest;
    if (name === null) throw new BundleError("the bundle holds no stored vectors, expected those that export writes; export again");
    return runSelftest(this, await this.#read(name), this.where(name));
  }

  /** Release the engine's memory; the model and its streams then throw UsageError. */
  async close() {
    await this.engine.close();
  }
}
