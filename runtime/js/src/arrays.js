// @ts-check
/** Arrays with a type and a shape, row-major; blocks of them are copied and cleared here. */

import { UsageError, isWhole, shown } from "./errors.js";

/** @typedef {"bool" | "int32" | "float32" | "float16" | "int64" | "float64"} DType */
/** @typedef {Uint8Array | Int32Array | Float32Array | Uint16Array | Float64Array} Data */

export const TYPES = { bool: Uint8Array, int32: Int32Array, float32: Float32Array, float16: Uint16Array, int64: Float64Array, float64: Float64Array };

/** A dense array. Half precision is kept as its bits; int64 is only read from files, as numbers. */
export class NdArray {
  /**
   * @param {DType} dtype
   * @param {number[]} shape
   * @param {Data} data its values in row-major order
   */
  constructor(dtype, shape, data) {
    this.dtype = dtype;
    this.shape = shape;
    this.data = data;
  }

  /** Return zeros. @param {DType} dtype @param {number[]} shape */
  static zeros(dtype, shape) {
    return new NdArray(dtype, shape, new TYPES[dtype](count(shape)));
  }

  /** Return the same values in another type; half precision rounds to even. @param {DType} dtype */
  as(dtype) {
    if (dtype === this.dtype) return this;
    const from = this.dtype === "float16" ? Float32Array.from(this.data, numberOf) : this.data;
    const data = dtype === "float16" ? Uint16Array.from(from, halfOf) : TYPES[dtype].from(/** @type {any} */ (from));
    return new NdArray(dtype, this.shape, data);
  }

  /** Return a copy. */
  copy() {
    return new NdArray(this.dtype, this.shape, this.data.slice());
  }

  /** Return the same values with a different shape, not copied. @param {number[]} shape */
  view(shape) {
    return new NdArray(this.dtype, shape, this.data);
  }

  /** Return values repeated along axes of size 1, and along axes before the first, as NumPy broadcasts. @param {number[]} shape */
  spread(shape) {
    const found = NdArray.zeros(this.dtype, shape);
    const own = [...shape.slice(this.shape.length).map(() => 1), ...this.shape];
    const strides = own.map((size, axis) => (size === 1 ? 0 : count(own.slice(axis + 1))));
    for (let at = 0; at < found.data.length; at += 1) {
      let [rest, place] = [at, 0];
      for (let axis = shape.length - 1; axis >= 0; axis -= 1) {
        place += (rest % shape[axis]) * strides[axis];
        rest = Math.floor(rest / shape[axis]);
      }
      found.data[at] = this.data[place];
    }
    return found;
  }

  /** Return entry `at` of the first axis, not copied. @param {number} at */
  row(at) {
    const shape = this.shape.slice(1);
    const size = count(shape);
    return new NdArray(this.dtype, shape, this.data.subarray(at * size, (at + 1) * size));
  }
}

/** Return the number of values in a shape. @param {readonly number[]} shape */
export function count(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** Return whether two shapes are the same. @param {readonly unknown[]} one @param {readonly unknown[]} other */
export function alike(one, other) {
  return one.length === other.length && one.every((size, axis) => size === other[axis]);
}

/** Return a shape with one more axis. @param {readonly number[]} shape @param {number | null} axis @param {number} size */
export function inserted(shape, axis, size) {
  return axis === null ? [...shape] : [...shape.slice(0, axis), size, ...shape.slice(axis)];
}

/** Return a shape without some axes. @param {readonly number[]} shape @param {(number | null)[]} axes */
export function without(shape, ...axes) {
  return shape.filter((_, axis) => !axes.includes(axis));
}

/**
 * Visit the contiguous runs of a block that lies in two arrays.
 * @param {readonly number[]} size of the block
 * @param {readonly number[]} one the first array's shape
 * @param {readonly number[]} first the block's first index there
 * @param {readonly number[]} two
 * @param {readonly number[]} second
 * @param {(one: number, two: number, length: number) => void} visit
 */
function runs(size, one, first, two, second, visit) {
  if (size.includes(0)) return;
  let [axes, length] = [size.length, 1];
  while (axes > 0) {
    axes -= 1;
    length *= size[axes];
    if (size[axes] !== one[axes] || size[axes] !== two[axes]) break;
  }
  const strides = [one, two].map((shape) => shape.map((_, axis) => count(shape.slice(axis + 1))));
  const places = [first, second].map((index, side) => index.reduce((sum, at, axis) => sum + at * strides[side][axis], 0));
  const walk = (/** @type {number} */ axis, /** @type {number} */ a, /** @type {number} */ b) => {
    if (axis === axes) return visit(a, b, length);
    for (let at = 0; at < size[axis]; at += 1) walk(axis + 1, a + at * strides[0][axis], b + at * strides[1][axis]);
  };
  walk(0, places[0], places[1]);
}

/**
 * Copy a block from one array into another of the same type and rank.
 * @param {NdArray} to
 * @param {readonly number[]} at the block's first index there
 * @param {NdArray} from
 * @param {readonly number[]} first its first index here
 * @param {readonly number[]} size
 */
export function copyBlock(to, at, from, first, size) {
  runs(size, to.shape, at, from.shape, first, (a, b, length) => to.data.set(from.data.subarray(b, b + length), a));
}

/** Set a block to zeros. @param {NdArray} array @param {readonly number[]} first @param {readonly number[]} size */
export function clearBlock(array, first, size) {
  runs(size, array.shape, first, array.shape, first, (at, _, length) => array.data.fill(0, at, at + length));
}

/** Return an array with a block of another in its corner and zeros elsewhere; the other itself if nothing changes. @param {NdArray} from @param {number[]} shape */
export function fitted(from, shape) {
  if (alike(from.shape, shape)) return from;
  const found = NdArray.zeros(from.dtype, shape);
  const corner = shape.map(() => 0);
  copyBlock(found, corner, from, corner, shape.map((size, axis) => Math.min(size, from.shape[axis])));
  return found;
}

const FLOAT = new Float32Array(1);
const BITS = new Uint32Array(FLOAT.buffer);

/** Return a number in half precision, as its bits, rounded to even. @param {number} value */
function halfOf(value) {
  FLOAT[0] = value;
  const [sign, bits] = [(BITS[0] >>> 16) & 0x8000, BITS[0] & 0x7fffffff];
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00; // 65536 and more
  if (bits >= 0x38800000) return sign | ((bits + 0xfff + ((bits >>> 13) & 1) - 0x38000000) >>> 13);
  const steps = Math.abs(FLOAT[0]) * 2 ** 24; // below 2^-14, in steps of 2^-24
  const [whole, rest] = [Math.floor(steps), steps % 1];
  return sign | (whole + (rest > 0.5 || (rest === 0.5 && whole % 2 === 1) ? 1 : 0));
}

/** Return the number that bits of half precision say. @param {number} bits */
function numberOf(bits) {
  const [exponent, rest] = [(bits >>> 10) & 31, bits & 1023];
  const size = exponent === 31 ? (rest ? NaN : Infinity) : exponent ? (1 + rest / 1024) * 2 ** (exponent - 15) : rest * 2 ** -24;
  return bits & 0x8000 ? -size : size;
}

const KINDS = new Map(/** @type {[Function, DType][]} */ ([[Float32Array, "float32"], [Float64Array, "float64"], [Int32Array, "int32"], [Int16Array, "int32"],
  [Int8Array, "int32"], [Uint8Array, "int32"], [Uint16Array, "int32"], [Uint32Array, "int64"]]));

/**
 * Return what a caller gave as an array: an NdArray, an ONNX Runtime tensor, a typed array, or rectangular lists.
 * @param {any} given
 * @param {string} what it is called, for messages
 * @returns {NdArray}
 */
export function asArray(given, what) {
  const [data, shape, named] = ArrayBuffer.isView(given) ? [given, [/** @type {any} */ (given).length], null] : [given?.data, given?.shape ?? given?.dims, given?.dtype ?? given?.type];
  if (ArrayBuffer.isView(data)) {
    const dtype = Object.hasOwn(TYPES, named ?? "") ? /** @type {DType} */ (named) : KINDS.get(data.constructor);
    const values = /** @type {any} */ (data);
    const held = dtype === "float16" && values.BYTES_PER_ELEMENT === 2 ? new Uint16Array(values.buffer, values.byteOffset, values.length) : values;
    const isHeld = dtype !== undefined && (held instanceof TYPES[dtype] || (!dtype.startsWith("float") && !data.constructor.name.startsWith("Float")));
    if (!isHeld || !Array.isArray(shape) || !shape.every(isWhole) || count(shape) !== values.length) {
      throw new UsageError(`${what} are ${values.length} values of ${named ? `${named} in ` : ""}${data.constructor.name} with shape ${shown(shape)}, expected as many as the shape has, of bool, int32, float32 or float16`);
    }
    return new NdArray(dtype, [...shape], held instanceof TYPES[dtype] ? held : /** @type {any} */ (TYPES[dtype]).from(held, Number)); // BigInt, too
  }
  return ofLists(given, what);
}

/** Return nested lists of numbers or of booleans as an array. @param {any} lists @param {string} what @returns {NdArray} */
function ofLists(lists, what) {
  const shape = /** @type {number[]} */ ([]);
  for (let part = lists; Array.isArray(part) || ArrayBuffer.isView(part); part = /** @type {any} */ (part)[0]) shape.push(/** @type {any} */ (part).length);
  const flat = /** @type {any[]} */ ([]);
  const walk = (/** @type {any} */ part, /** @type {number} */ axis) => {
    const isList = Array.isArray(part) || ArrayBuffer.isView(part);
    if (isList !== axis < shape.length || (isList && /** @type {any} */ (part).length !== shape[axis])) throw new UsageError(`${what} have rows of different lengths, expected one rectangular array; pad them`);
    if (!isList) flat.push(part);
    else for (const each of /** @type {any} */ (part)) walk(each, axis + 1);
  };
  walk(lists, 0);
  if (flat.every((value) => typeof value === "boolean") && flat.length) return new NdArray("bool", shape, Uint8Array.from(flat, Number));
  const odd = flat.find((value) => typeof value !== "number");
  if (odd !== undefined || !shape.length) throw new UsageError(`${what} hold ${shown(odd ?? lists)}, expected an array of numbers`);
  return new NdArray(flat.every(Number.isInteger) ? "int64" : "float64", shape, Float64Array.from(flat));
}

/** Return whether an array's type has whole numbers. @param {NdArray} array */
export function isInteger(array) {
  return array.dtype === "int32" || array.dtype === "int64";
}
