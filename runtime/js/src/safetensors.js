// @ts-check
/** Files of tensors, safetensors: their headers, reading and writing. */

import { NdArray, TYPES, count } from "./arrays.js";
import { brief, isWhole } from "./errors.js";

/** @typedef {import("./arrays.js").DType} DType */
/** @typedef {{dtype: string, shape: number[], data_offsets: [number, number]}} Entry */

const NAMES = { bool: "BOOL", int32: "I32", float32: "F32", float16: "F16", int64: "I64", float64: "F64" };
const DTYPES = Object.fromEntries(Object.entries(NAMES).map(([dtype, name]) => [name, /** @type {DType} */ (dtype)]));
const WIDTHS = { bool: 1, int32: 4, float32: 4, float16: 2, int64: 8, float64: 8 };

/**
 * Return the metadata, the entries by name, and the place of the first tensor's byte.
 * @param {Uint8Array} bytes
 * @param {number} most bytes of a header
 * @returns {{facts: Record<string, string>, entries: Map<string, Entry>, start: number}}
 * @throws {Error} the bytes do not begin with a header
 */
function readHeader(bytes, most) {
  const length = bytes.length < 8 ? Infinity : Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  if (length > Math.min(bytes.length - 8, most)) throw new Error(`it has ${bytes.length} bytes, and its header would take ${length} bytes`);
  const header = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.subarray(8, 8 + length)));
  if (header === null || typeof header !== "object" || Array.isArray(header)) throw new Error("its header is no object");
  const { __metadata__: facts, ...entries } = header;
  for (const [name, entry] of Object.entries(entries)) {
    const { dtype, shape, data_offsets: places } = entry ?? {};
    const sound = [shape, places].every((list) => Array.isArray(list) && list.every((number) => isWhole(number) && number >= 0));
    if (typeof dtype !== "string" || !sound || places.length !== 2) throw new Error(`${brief(name)} has no type, shape and place`);
  }
  if (!Object.values(facts ?? {}).every((value) => typeof value === "string")) throw new Error("its metadata are no texts");
  return { facts: facts ?? {}, entries: new Map(Object.entries(entries)), start: 8 + length };
}

/** Return a copy of one tensor. @param {Uint8Array} bytes @param {number} start @param {string} name @param {Entry} entry */
function tensorOf(bytes, start, name, entry) {
  const [first, last] = entry.data_offsets;
  const dtype = DTYPES[entry.dtype];
  if (dtype === undefined) throw new Error(`${brief(name)} is of type ${brief(entry.dtype)}, expected ${Object.keys(DTYPES).join(", ")}`);
  if (last > bytes.length - start || last - first !== count(entry.shape) * WIDTHS[dtype]) {
    throw new Error(`${brief(name)} is ${entry.dtype} [${entry.shape.join(", ")}] at ${first} … ${last}, expected as many bytes as its shape has, in the file`);
  }
  const { buffer } = bytes.slice(start + first, start + last);
  const data = dtype === "int64" ? Float64Array.from(new BigInt64Array(buffer), Number) : new TYPES[dtype](buffer);
  if (dtype === "bool" && data.some((value) => value > 1)) throw new Error(`${brief(name)} is BOOL and holds more than 1`);
  return new NdArray(dtype, entry.shape, data);
}

/**
 * Return the metadata of a file and copies of all its tensors, which have to fill it without gap or overlap.
 * @param {Uint8Array} bytes
 * @returns {{facts: Record<string, string>, tensors: Map<string, NdArray>}}
 * @throws {Error} the bytes are damaged, or of a different kind
 */
export function readTensors(bytes) {
  const { facts, entries, start } = readHeader(bytes, 2 ** 20);
  let end = 0;
  for (const [name, entry] of [...entries].sort(([, one], [, two]) => one.data_offsets[0] - two.data_offsets[0] || one.data_offsets[1] - two.data_offsets[1])) {
    if (entry.data_offsets[0] !== end) throw new Error(`${brief(name)} is at ${entry.data_offsets[0]}, expected it at ${end}`);
    end = entry.data_offsets[1];
  }
  if (end !== bytes.length - start) throw new Error(`its tensors end at ${end}, its data at ${bytes.length - start}`);
  return { facts, tensors: new Map([...entries].map(([name, entry]) => [name, tensorOf(bytes, start, name, entry)])) };
}

/** Return copies of some tensors of a large file. @param {Uint8Array} bytes @param {Iterable<string>} names */
export function pickTensors(bytes, names) {
  const { entries, start } = readHeader(bytes, 1e8);
  return new Map([...names].map((name) => {
    const entry = entries.get(name);
    if (entry === undefined) throw new Error(`it lacks ${brief(name)}`);
    return [name, tensorOf(bytes, start, name, entry)];
  }));
}

/** Return the bytes of a file. @param {Record<string, string>} facts @param {Map<string, NdArray>} tensors */
export function writeTensors(facts, tensors) {
  const ordered = [...tensors].sort(([, one], [, two]) => WIDTHS[two.dtype] - WIDTHS[one.dtype]); // the largest types first, so that all are aligned
  const header = /** @type {Record<string, unknown>} */ ({ __metadata__: facts });
  let end = 0;
  for (const [name, { dtype, shape, data }] of ordered) header[name] = { dtype: NAMES[dtype], shape, data_offsets: [end, (end += data.byteLength)] };
  const text = new TextEncoder().encode(JSON.stringify(header));
  const start = 8 + Math.ceil(text.length / 8) * 8;
  const bytes = new Uint8Array(start + end).fill(32, 8, start);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(start - 8), true);
  bytes.set(text, 8);
  let at = start;
  for (const [, { data }] of ordered) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return bytes;
}
