// @ts-check
/** ONNX Runtime: onnxruntime-node and onnxruntime-web have one interface, and differ in whether memory can be shared. */

import { NdArray } from "./arrays.js";
import { BackendError, BundleError, UnsupportedError, UsageError, oneLine, shown } from "./errors.js";

/**
 * @typedef {import("./manifest.js").Program} Program
 * @typedef {{run: (feeds: any, fetches: any) => Promise<any>, release: () => Promise<void>, inputNames: readonly string[], outputNames: readonly string[]}} Session
 * @typedef {{env: any, Tensor: any, InferenceSession: any}} Ort
 */

const FIRST_VERSIONS = /** @type {Record<number, number>} */ ({ 22: 21, 23: 23, 24: 25 }); // minor version of 1.x that first runs an opset
const BACKENDS = ["cpu", "webgpu"];

/** Return ONNX Runtime for this place. @returns {Promise<Ort>} */
export async function importOrt() {
  const name = typeof /** @type {any} */ (globalThis).process?.versions?.node === "string" ? "onnxruntime-node" : "onnxruntime-web";
  try {
    return await import(/* @vite-ignore */ name);
  } catch (error) {
    throw new BackendError(`${name} cannot be imported (${oneLine(error)}), expected it beside txl-runtime; npm install ${name}, or give load(…, { ort })`);
  }
}

/** Sessions of one model's graphs; programs that share a file share its session. */
export class Engine {
  /** @type {Map<string, Session>} */
  #sessions = new Map();
  /** @type {Set<Promise<any>>} */
  #running = new Set();

  /** @param {Ort} ort @param {{threads?: number, backend?: string}} options */
  constructor(ort, { threads, backend = "cpu" }) {
    if (typeof ort?.InferenceSession?.create !== "function") throw new UsageError(`ort is ${shown(ort)}, expected the module onnxruntime-web or onnxruntime-node`);
    if (!BACKENDS.includes(backend)) throw new BackendError(`backend ${shown(backend)} is unknown, expected one of ${BACKENDS.join(", ")}`);
    if (threads !== undefined && (!Number.isInteger(threads) || threads < 1 || threads > 1024)) throw new BackendError(`threads is ${shown(threads)}, expected a whole number of 1 … 1024; leave it out for the engine's choice`);
    const { node, web, common } = ort.env?.versions ?? {};
    this.ort = ort;
    this.version = /** @type {string} */ (node ?? web ?? common ?? "");
    /** True if an input and an output can be one buffer, as a ring needs: onnxruntime-web copies both. */
    this.inPlace = node !== undefined;
    if (this.inPlace && backend === "webgpu") throw new BackendError("backend is webgpu, expected cpu with onnxruntime-node; give load the module onnxruntime-web/webgpu in a page");
    this.description = `ONNX Runtime ${this.version} (${this.inPlace ? "onnxruntime-node" : `onnxruntime-web, ${backend === "cpu" ? "wasm" : backend}`})`;
    this.options = {
      executionProviders: this.inPlace ? ["cpu"] : [backend === "cpu" ? "wasm" : backend], // one alone: wasm, listed after WebGPU, would silently replace it
      ...(threads === undefined ? {} : { intraOpNumThreads: threads }),
      interOpNumThreads: 1,
      logSeverityLevel: /** @type {const} */ (3),
    };
  }

  /**
   * Open a program's graph, if no program before it had the same file.
   * @param {Program} program
   * @param {string} where the graph's path, for messages
   * @param {() => Promise<Uint8Array>} read the graph
   * @param {{path: string, data: Uint8Array}} weights
   */
  async open(program, where, read, weights) {
    for (const spec of [...program.inputs, ...program.outputs]) {
      if (/** @type {string} */ (spec.dtype) === "bfloat16") throw new UnsupportedError(`${where}: ${spec.name} is bfloat16, which JavaScript has no array for, expected another type; export another precision`);
    }
    if (this.#sessions.has(program.file)) return;
    const enableCpuMemArena = program.kind === "hidden" || program.kind === "step"; // only for layers: for the softmax it would keep rows of the whole vocabulary
    try {
      const session = await this.ort.InferenceSession.create(await read(), { ...this.options, enableCpuMemArena, externalData: [weights] });
      const [there, listed] = [[session.inputNames, session.outputNames], [program.inputs, program.outputs].map((side) => side.map((spec) => spec.name))].map(String);
      if (there !== listed) throw new Error(`it reads and returns ${there}, and the manifest says ${listed}`);
      this.#sessions.set(program.file, session);
    } catch (error) {
      if (this.options.executionProviders[0] === "webgpu") throw new BackendError(`${where}: ${oneLine(error)}; expected WebGPU in this browser and ort of onnxruntime-web/webgpu; use these, or backend cpu`);
      const first = FIRST_VERSIONS[program.opset["ai.onnx"]];
      const [major, minor] = this.version.split(".").map(Number);
      const able = first !== undefined && major === 1 && minor < first ? `ONNX Runtime 1.${first} or newer for opset ${program.opset["ai.onnx"]}, and this is ${this.version}; install that` : "a graph ONNX Runtime can load";
      throw error instanceof BundleError ? error : new BundleError(`${where}: ${oneLine(error)}; expected ${able}`);
    }
  }

  /**
   * Run a program.
   * @param {Program} program
   * @param {Map<string, NdArray>} inputs
   * @param {Map<string, string>} [inPlace] names of inputs into which outputs are written, by the outputs' names
   * @returns {Promise<Map<string, NdArray>>} all outputs
   */
  async run(program, inputs, inPlace = new Map()) {
    const session = this.#sessions.get(program.file);
    if (session === undefined) throw new UsageError("the model was closed, expected an open one; load the bundle again");
    const feeds = /** @type {Record<string, any>} */ ({});
    for (const [name, array] of inputs) feeds[name] = new this.ort.Tensor(array.dtype, array.data, array.shape);
    const fetches = /** @type {Record<string, any>} */ ({});
    for (const { name } of program.outputs) fetches[name] = feeds[inPlace.get(name) ?? ""] ?? null;
    const work = session.run(feeds, fetches);
    this.#running.add(work);
    try {
      const found = await work;
      return new Map(program.outputs.map(({ name }) => [name, inputs.get(inPlace.get(name) ?? "") ?? arrayOf(found[name])]));
    } catch (error) {
      throw new BackendError(`program ${program.name} failed in ONNX Runtime: ${oneLine(error)}`);
    } finally {
      this.#running.delete(work);
    }
  }

  /** True after `close`. */
  get isClosed() {
    return !this.#sessions.size;
  }

  /** Release the sessions, after the runs that are under way. */
  async close() {
    const sessions = [...this.#sessions.values()];
    this.#sessions.clear();
    await Promise.allSettled(this.#running);
    for (const session of sessions) await session.release();
  }
}

/** @param {any} tensor of ONNX Runtime */
function arrayOf(tensor) {
  const { type, dims, data } = tensor;
  return new NdArray(type, [...dims], type === "float16" ? new Uint16Array(data.buffer, data.byteOffset, data.length) : data);
}
