// @ts-check
/** Snapshots: copies of streams' state that can be saved, loaded and restored, as files that Python reads and writes. */

import { NdArray, alike } from "./arrays.js";
import { UsageError, brief, few, oneLine, shown } from "./errors.js";
import { counted } from "./manifest.js";
import { readTensors, writeTensors } from "./safetensors.js";
import { takenAxes } from "./states.js";

/** @typedef {import("./manifest.js").State} State */
/** @typedef {import("./manifest.js").Manifest} Manifest */

const [MEMORY, WHOLE, BOTH] = ["txl-deploy.state/1", "txl-deploy.state/2", "txl-deploy.state/3"];
const PREFIX = "whole/";

/** A copy of the state of b sequences, bound to the model it came from. */
export class StreamState {
  /**
   * @param {string} modelId
   * @param {Int32Array} fill [b], memory rows of each sequence
   * @param {Map<string, NdArray>} memory float32 [b, rows, …] by name, the oldest row first, shorter sequences with zeros before
   * @param {Int32Array | null} head [b], each sequence's next slot in its ring; null where nothing is counted
   * @param {Map<string, NdArray> | null} states replaced states by name; null if there are only memory rows
   */
  constructor(modelId, fill, memory, head, states) {
    this.modelId = modelId;
    this.fill = fill;
    this.memory = memory;
    this.head = head;
    this.states = states;
  }

  /** b, the number of sequences. */
  get batchSize() {
    return this.fill.length;
  }

  /** Return the bytes of the file that Python's `StreamState.save` writes. */
  toBytes() {
    const { states, head, fill } = this;
    const counts = states === null || head !== null;
    const facts = { format: states === null ? MEMORY : counts ? BOTH : WHOLE, model_id: this.modelId, ...(states === null ? {} : { batch_size: String(this.batchSize) }) };
    const tensors = new Map(counts ? [["fill", new NdArray("int32", [fill.length], fill)], ...this.memory] : []);
    if (head !== null) tensors.set("head", new NdArray("int32", [head.length], head));
    for (const [name, tensor] of states ?? []) tensors.set(`${counts ? PREFIX : ""}${name}`, tensor);
    return writeTensors(facts, tensors);
  }

  /**
   * Read the bytes of a saved state; the arrays are copies.
   * @param {Uint8Array} bytes
   * @param {string} [source] begins messages
   * @throws {UsageError} the bytes are damaged, or no saved state
   */
  static fromBytes(bytes, source = "the state") {
    if (!(bytes instanceof Uint8Array)) throw new UsageError(`${source} is given as ${shown(bytes)}, expected a Uint8Array`);
    let read;
    try {
      read = readTensors(bytes);
    } catch (error) {
      throw new UsageError(`${source}: ${oneLine(error)}; expected a saved state; StreamState.toBytes makes one`);
    }
    const { facts, tensors } = read;
    const [kind, size] = [facts.format, facts.batch_size ?? ""];
    if (kind === WHOLE && /^[1-9]\d{0,5}$/.test(size)) return new StreamState(facts.model_id ?? "", new Int32Array(Number(size)), new Map(), null, tensors);
    const [fill, head] = [tensors.get("fill"), tensors.get("head")];
    if ((kind !== MEMORY && kind !== BOTH) || fill?.shape.length !== 1 || fill.dtype !== "int32") throw new UsageError(`${source}: another kind of file, expected a saved state (${MEMORY} or ${WHOLE})`);
    if (head && (!alike(head.shape, fill.shape) || head.dtype !== "int32")) throw new UsageError(`${source}: its head is ${head.dtype} ${shown(head.shape)}, expected int32 ${shown(fill.shape)}`);
    tensors.delete("fill");
    tensors.delete("head");
    const [counts, slots] = [/** @type {Int32Array} */ (fill.data), /** @type {Int32Array | null} */ (head?.data ?? null)];
    if (kind === MEMORY) return new StreamState(facts.model_id ?? "", counts, tensors, slots, null);
    const isWhole = (/** @type {string} */ name) => name.startsWith(PREFIX);
    const whole = new Map([...tensors].flatMap(([name, tensor]) => (isWhole(name) ? [[name.slice(PREFIX.length), tensor]] : [])));
    return new StreamState(facts.model_id ?? "", counts, new Map([...tensors].filter(([name]) => !isWhole(name))), slots ?? new Int32Array(counts.length), whole);
  }
}

/** Return whether a snapshot has replaced states; without memory rows it does, even if there are none. @param {Manifest} manifest @param {State[]} table */
export function keepsWhole(manifest, table) {
  return !manifest.countsRows || table.some((state) => !counted(state));
}

/**
 * Compare a whole snapshot with the stream that is to continue from it, before anything is changed.
 * @param {any} state
 * @param {Manifest} manifest
 * @param {State[]} table
 * @param {number} b sequences of the stream
 * @throws {UsageError} it does not fit
 */
export function checkFits(state, manifest, table, b) {
  if (!(state instanceof StreamState)) throw new UsageError(`the state is ${shown(state)}, expected a StreamState; StreamState.fromBytes reads one`);
  if (state.modelId !== manifest.modelId) {
    throw new UsageError(`the state belongs to model ${state.modelId.slice(0, 12) || "unknown"}, this bundle is ${manifest.modelId.slice(0, 12)}; restore it in the model it was taken from`);
  }
  if (state.batchSize !== b) throw new UsageError(`the state holds ${state.batchSize} sequences, expected ${b}; open a stream of as many, or take and put sequences one by one`);
  if ((state.states !== null) !== keepsWhole(manifest, table)) {
    const [held, kept] = state.states === null ? ["memory rows", "whole tensors"] : ["whole tensors", "memory rows"];
    throw new UsageError(`the state holds ${held}, this model carries ${kept}; restore a state of the same form`);
  }
  if (state.fill.some((rows) => rows < 0 || rows > manifest.memoryLength)) throw new UsageError(`the state's fill is ${few(state.fill)}, expected 0 … ${manifest.memoryLength}; take it again`);
  const rows = Math.max(0, ...state.fill);
  const known = new Map(table.map((entry) => [entry.name, entry]));
  for (const [tensors, ofMemory] of /** @type {const} */ ([[state.memory, true], [state.states ?? new Map(), false]])) {
    const mine = table.filter((entry) => counted(entry) === ofMemory).map((entry) => entry.name);
    for (const name of new Set([...mine, ...tensors.keys()])) {
      const [entry, found] = [known.get(name), tensors.get(name)];
      if (entry === undefined || !mine.includes(name)) throw new UsageError(`the state has ${brief(name)}, expected ${mine.join(", ") || "nothing"}; take it again`);
      if (found !== undefined || !entry.absent) checkTensor(entry, found, manifest, b, rows);
    }
  }
}

/** @param {State} entry @param {NdArray | undefined} found @param {Manifest} manifest @param {number} b @param {number} rows memory rows */
function checkTensor(entry, found, manifest, b, rows) {
  const axes = takenAxes(entry);
  const dtype = counted(entry) ? "float32" : entry.dtype;
  const [fewest, most] = counted(entry) ? [rows, rows] : (entry.rows ?? [0, 0]);
  const held = axes.rows === null ? 0 : (found?.shape[axes.rows] ?? -1);
  const wanted = axes.shape.map((size, axis) => (axis === axes.batch ? b : axis === axes.rows ? Math.min(Math.max(held, fewest), most) : size));
  if (found?.dtype !== dtype || !alike(found.shape, wanted)) {
    const sizes = wanted.map((size, axis) => (axis === axes.rows && fewest < most ? `${fewest} … ${most}` : size));
    throw new UsageError(`the state's ${entry.name} is ${found ? `${found.dtype} ${shown(found.shape)}` : "absent"}, expected ${dtype} [${sizes.join(", ")}]; take it again, or restore a state of a bundle that keeps the same form of memory`);
  }
  if (entry.rows === null || axes.rows === null) return;
  const specs = manifest.programs.flatMap((program) => [...program.inputs, ...program.outputs]).filter(({ name }) => name === entry.input || name === entry.output);
  const reached = new Set([0, ...specs.map((spec) => spec.shape[/** @type {number} */ (axes.rows)])]);
  if (!reached.has("rows") && !reached.has(held)) throw new UsageError(`the state's ${entry.name} has ${held} rows, expected one of ${[...reached].join(", ")}; take it again, or put it into the bundle it was taken from`);
}
