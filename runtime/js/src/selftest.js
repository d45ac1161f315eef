// @ts-check
/** The self-test: it replays a bundle's stored vectors, to check that it computes the original model's results here. */

import { NdArray, copyBlock, count } from "./arrays.js";
import { BackendError, BundleError, CheckError, TxlError, oneLine, shown } from "./errors.js";
import { counted } from "./manifest.js";
import { readTensors } from "./safetensors.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {Map<string, NdArray>} Tensors */

const MASK = 1000; // values from here on, such as -1e4, are compared relative to themselves
const LIMIT = 1e-4; // of float32 on a CPU

/** The result of a replay. */
export class SelftestResult {
  /** @param {{outputs: number, state: number}} largest differences @param {{outputs: number, state: number}} limits @param {string} engine */
  constructor(largest, limits, engine) {
    this.largest = largest;
    this.limits = limits;
    this.engine = engine;
  }

  /** True if every difference is within its limit. */
  get passed() {
    return this.largest.outputs <= this.limits.outputs && this.largest.state <= this.limits.state;
  }

  /** Throw CheckError unless the replay passed. */
  require() {
    if (this.passed) return;
    const told = /** @type {const} */ (["outputs", "state"]).map((side) => `${side} differ by ${this.largest[side].toExponential(2)} (limit ${this.limits[side].toExponential(1)})`);
    throw new CheckError(`self-test failed on ${this.engine}: ${told.join(", ")}; do not use this bundle here; export it again or try another engine`);
  }
}

/**
 * Replay stored vectors with B sequences.
 * @param {Model} model
 * @param {Uint8Array} bytes
 * @param {string} where the file's path, for messages
 */
export async function runSelftest(model, bytes, where) {
  try {
    const vectors = (where.endsWith(".npz") ? await readArchive(bytes) : readTensors(bytes).tensors);
    const found = await replay(model, translated(vectors, model));
    return new SelftestResult(found, limitsOf(model, vectors), model.engine.description);
  } catch (error) {
    if (error instanceof BackendError || (error instanceof TxlError && model.engine.isClosed)) throw error;
    throw new BundleError(`${where}: stored vectors do not fit (${oneLine(error)}); export the model again`);
  }
}

/** @param {Tensors} vectors @param {string} name */
function need(vectors, name) {
  const found = vectors.get(name);
  if (found === undefined) throw new Error(`they lack ${name}`);
  return found;
}

/** Return the limits of differences: below float32 twice what the exporter's machine reached. @param {Model} model @param {Tensors} vectors */
function limitsOf(model, vectors) {
  if (model.manifest.precision === "fp32") return { outputs: LIMIT, state: LIMIT };
  const [nats, most] = [model.manifest.logprobs?.name, { output: LIMIT, state: LIMIT, memory: LIMIT }];
  for (const [name, { dtype, data }] of vectors) {
    const kind = name.split("/")[0];
    if (!(kind in most || name === "logprobs") || !dtype.startsWith("float")) continue;
    const side = kind === "logprobs" ? "output" : /** @type {"output"} */ (kind);
    const inNats = name === "logprobs" || name === `output/${nats}`;
    for (const value of data) most[side] = Math.max(most[side], inNats ? (Math.abs(value) < MASK ? Math.abs(value) : 0) : Math.min(Math.abs(value), 1));
  }
  const reached = [...need(vectors, "reached").data];
  const bounds = [most.output, Math.max(most.state, most.memory)];
  if (reached.length !== 2 || !reached.every((value, side) => value >= 0 && value <= bounds[side])) throw new Error(`reached is ${shown(reached)}, expected 0 … ${bounds[0]} and 0 … ${bounds[1]}`);
  return { outputs: 2 * reached[0] + LIMIT, state: 2 * reached[1] + LIMIT };
}

/** Return a Transformer-XL's vectors in the form of any step's; others unchanged. @param {Tensors} vectors @param {Model} model @returns {Tensors} */
function translated(vectors, model) {
  const { tokens, logprobs, vocabSize } = model.manifest;
  const ids = vectors.get("tokens");
  if (ids === undefined) return vectors;
  if (tokens === null || logprobs === null) throw new Error("vectors of token ids, which this model does not take");
  const [positions, columns, expected] = ["positions", "columns", "logprobs"].map((name) => need(vectors, name));
  const [steps, b] = positions.shape;
  if (String(expected.shape) !== String([...positions.shape, ...columns.shape])) throw new Error(`log-probabilities have shape ${shown(expected.shape)}`);
  const places = Float64Array.from({ length: count(expected.shape) }, (_, at) => positions.data[Math.floor(at / columns.data.length)] * vocabSize + columns.data[at % columns.data.length]);
  const flat = [steps, b, places.length / (steps * b)];
  return new Map([...vectors, [`input/${tokens.name}`, ids], [`place/${logprobs.name}`, new NdArray("int64", flat, places)], [`output/${logprobs.name}`, expected.view(flat)]]);
}

/** Return values of a tensor at flat places. @param {NdArray} from @param {ArrayLike<number>} places */
function at(from, places) {
  const values = from.as("float32").data; // also of half precision
  const exact = from.dtype === "float16" ? values : from.data;
  return Float64Array.from(places, (place) => exact[place] ?? NaN);
}

/** Return one sequence's part of an array, or all where there is no such axis. @param {NdArray} array @param {number} axis @param {number} row */
function partOf(array, axis, row) {
  if (axis < 0) return array;
  const size = array.shape.map((all, side) => (side === axis ? 1 : all));
  const found = NdArray.zeros(array.dtype, size);
  copyBlock(found, size.map(() => 0), array, size.map((_, side) => (side === axis ? row : 0)), size);
  return found.view(size.filter((_, side) => side !== axis));
}

/** Collects pairs of values of one tensor, and returns the largest relative difference. */
class Compared {
  /** @type {number[]} */
  found = [];
  /** @type {number[]} */
  wanted = [];

  /** @param {Float64Array} found @param {ArrayLike<number>} wanted */
  add(found, wanted) {
    if (found.length !== wanted.length) throw new Error(`${wanted.length} values at ${found.length} places`);
    for (let index = 0; index < found.length; index += 1) this.found.push(found[index]), this.wanted.push(wanted[index]);
  }

  /** @param {boolean} isWhole whether all have to be equal @param {boolean} inNats */
  largest(isWhole, inNats) {
    let [scale, worst] = [1, 0];
    for (const value of this.wanted) if (!inNats && Math.abs(value) < MASK) scale = Math.max(scale, Math.abs(value));
    this.wanted.forEach((value, index) => {
      const apart = this.found[index] === value ? 0 : isWhole ? Infinity : Math.abs(this.found[index] - value) / (Math.abs(value) < MASK ? scale : Math.abs(value));
      worst = Math.max(worst, Number.isNaN(apart) ? Infinity : apart);
    });
    return worst;
  }
}

/** Return the largest differences. @param {Model} model @param {Tensors} vectors */
async function replay(model, vectors) {
  const { manifest } = model;
  const b = manifest.batchSize;
  const stream = model.stream();
  const [lengths, counts, resets] = [need(vectors, "length"), need(vectors, "counts"), vectors.get("reset")];
  if (counts.shape.length !== 2 || counts.shape[1] !== b || !lengths.data.length) throw new Error(`counts have shape ${shown(counts.shape)}, expected [steps, ${b}]`);
  const outputs = new Map(manifest.outputs.map((output) => [output.name, new Compared()]));
  for (let step = 0; step < lengths.data.length; step += 1) {
    const own = Int32Array.from(counts.row(step).data);
    const again = resets ? Array.from(resets.row(step).data, Boolean) : [];
    if (again.some(Boolean)) stream.reset(again);
    const inputs = Object.fromEntries(manifest.given.map(({ name, dtype, axes }) => {
      const whole = need(vectors, `input/${name}`).row(step);
      const size = axes.sizes(b, lengths.data[step]);
      const array = NdArray.zeros(whole.dtype, size);
      copyBlock(array, size.map(() => 0), whole, size.map(() => 0), size);
      return [name, array.as(dtype)];
    }));
    const found = await stream.run(inputs, { lengths: own });
    for (const { name, axes } of manifest.outputs) {
      const [wanted, places] = [need(vectors, `output/${name}`), need(vectors, `place/${name}`)];
      const values = wanted.shape[2];
      own.forEach((live, row) => {
        if (!live) return;
        const which = places.shape.length === 1 ? places.data : places.row(step).row(row).data;
        outputs.get(name)?.add(at(partOf(found[name], axes.batch, row), which), wanted.row(step).row(row).as("float64").data.subarray(0, values));
      });
    }
  }
  let [worst, worstState] = [0, 0];
  for (const { name, dtype } of manifest.outputs) worst = Math.max(worst, /** @type {Compared} */ (outputs.get(name)).largest(!dtype.startsWith("float"), name === manifest.logprobs?.name));
  const rolled = manifest.statesOf("rolled");
  for (const [name, array] of Object.entries(stream.state())) {
    const state = /** @type {import("./manifest.js").State} */ (rolled.find((one) => one.name === name) ?? manifest.statesOf(model.update).find((one) => one.name === name));
    const compared = new Compared();
    const ends = vectors.get(`memory/${name}`);
    for (let row = 0; row < (state.batch_axis === null ? 1 : b); row += 1) {
      const part = partOf(array, state.batch_axis ?? -1, row);
      if (ends !== undefined && counted(state)) {
        const axis = /** @type {number} */ (state.row_axis) - 1;
        const edges = [manifest.memoryLength - stream.fill[row], manifest.memoryLength - 1];
        edges.forEach((edge, side) => compared.add(Float64Array.from(partOf(part, axis, edge).data), ends.row(row).row(side).data));
        continue;
      }
      const [wanted, places] = [need(vectors, `state/${name}`), need(vectors, `state_place/${name}`)];
      const shape = need(vectors, `state_shape/${name}`);
      if (String([...shape.data]) !== String(part.shape)) compared.add(Float64Array.of(NaN), [0]);
      else compared.add(at(part, places.shape.length > 1 ? places.row(row).data : places.data), wanted.row(row).as("float64").data);
    }
    worstState = Math.max(worstState, compared.largest(!array.dtype.startsWith("float"), false));
  }
  return { outputs: worst, state: worstState };
}

/** Return the arrays of an .npz file, a zip of NumPy's arrays, in which format 2.0 has its vectors. @param {Uint8Array} bytes @returns {Promise<Tensors>} */
async function readArchive(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const end = bytes.length - 22; // of the list of contents, which has no comment
  if (end < 0 || view.getUint32(end, true) !== 0x06054b50) throw new Error("it is no zip file");
  const found = /** @type {Tensors} */ (new Map());
  let place = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    const [method, packed, size, name, more, note, header] = [view.getUint16(place + 10, true), view.getUint32(place + 20, true), view.getUint32(place + 24, true), view.getUint16(place + 28, true), view.getUint16(place + 30, true), view.getUint16(place + 32, true), view.getUint32(place + 42, true)];
    const start = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
    const raw = bytes.slice(start, start + packed);
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const data = method === 0 ? raw : new Uint8Array(await new Response(stream).arrayBuffer());
    if (data.length !== size) throw new Error(`a part of the zip file has ${data.length} bytes, expected ${size}`);
    found.set(new TextDecoder().decode(bytes.subarray(place + 46, place + 46 + name)).replace(/\.npy$/, ""), ofNumpy(data));
    place += 46 + name + more + note;
  }
  return found;
}

const NUMPY = /** @type {Record<string, [import("./arrays.js").DType, any]>} */ ({ "<f4": ["float32", Float32Array], "<f8": ["float64", Float64Array], "<i4": ["int32", Int32Array], "<i8": ["int64", BigInt64Array], "<f2": ["float16", Uint16Array], "|b1": ["bool", Uint8Array] });

/** Return NumPy's array. @param {Uint8Array<ArrayBuffer>} bytes */
function ofNumpy(bytes) {
  const length = new DataView(bytes.buffer).getUint16(8, true);
  const header = new TextDecoder().decode(bytes.subarray(10, 10 + length));
  const [, type] = header.match(/'descr': '([^']+)'/) ?? [];
  const [, sizes] = header.match(/'shape': \(([^)]*)\)/) ?? [];
  if (!(type in NUMPY) || sizes === undefined) throw new Error(`NumPy's array is ${header.slice(0, 80)}`);
  const [dtype, Kind] = NUMPY[type];
  const data = new Kind(bytes.buffer.slice(10 + length));
  const shape = sizes.split(",").filter((part) => part.trim()).map(Number);
  const found = new NdArray(dtype, shape, dtype === "int64" ? Float64Array.from(data, Number) : data);
  if (!header.includes("'fortran_order': True")) return found;
  const strides = shape.map((_, axis) => count(shape.slice(0, axis))); // the first axis runs fastest
  const place = (/** @type {number} */ at) => shape.reduce((sum, size, axis) => sum + (Math.floor(at / count(shape.slice(axis + 1))) % size) * strides[axis], 0);
  return new NdArray(dtype, shape, found.data.map((/** @type {number} */ _, /** @type {number} */ at) => found.data[place(at)]));
}
