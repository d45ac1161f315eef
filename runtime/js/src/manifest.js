// @ts-check
/** The manifest: the description of a bundle, checked against the schema and against itself. */

import { alike, without } from "./arrays.js";
import { BundleError, TxlError, brief, few, oneLine, shown } from "./errors.js";
import { SCHEMA } from "./schema.js";

/**
 * @typedef {number | "B" | "L" | "rows"} Size
 * @typedef {import("./arrays.js").DType} DType
 * @typedef {{name: string, dtype: DType, shape: Size[]}} Spec
 * @typedef {{start: number, most: number, over?: string}} Counting
 * @typedef {{name: string, dtype: DType, shape: Size[], role: string, vocab: number | null, lookahead: number, counter: Counting | null, beyond: string | null, axes: Axes}} Input
 * @typedef {{name: string, dtype: DType, shape: Size[], role: string, clusters: [number, number][], cluster_columns: number[], width: number | null, axes: Axes}} Output
 * @typedef {{name: string, input: string, output: string, dtype: DType, shape: number[], batch_axis: number | null, row_axis: number | null, rows: [number, number] | null,
 *   absent: boolean, initial: number | string | null, update: string, slots: number | null, spill: number, in_place: boolean}} State
 * @typedef {{name: string, kind: string, segment_length: number, update: string, file: string, inputs: Spec[], outputs: Spec[], open_batch: boolean, opset: Record<string, number>}} Program
 */

export const RULES = ["ring", "rolled", "replace"];
const MOST_BYTES = 1 << 24; // of a manifest
const MOST_VALUES = 2 ** 40; // of one state tensor
const MOST_UNSEEN = 4096; // the largest B that no tensor's shape confirms
const PART = /^(?!(con|prn|aux|nul|com\d|lpt\d)(\.|$))[^<>:"|?*\\/\x00-\x1f\x7f]*[^<>:"|?*\\/\x00-\x1f\x7f .]$/i;

/** The axes of sequences and positions of an input or output. */
export class Axes {
  /** @param {Size[]} shape @param {number} [ahead] positions behind the segment's own */
  constructor(shape, ahead = 0) {
    this.shape = shape;
    this.ahead = ahead;
    /** The axis of sequences; -1 without. */
    this.batch = shape.indexOf("B");
    this.positions = shape.flatMap((size, axis) => (size === "L" ? [axis] : []));
  }

  /** Return the shape for b sequences and a segment. @param {number} b @param {number} length */
  sizes(b, length) {
    return this.shape.map((size) => (size === "B" ? b : size === "L" ? length + this.ahead : Number(size)));
  }

  /** Return the axes of one position. */
  get still() {
    return new Axes(this.shape.filter((size) => size !== "L"));
  }
}

/** Return whether the runtime counts a state's memory rows. @param {State} state */
export function counted(state) {
  return state.update !== "replace";
}

/** The facts about a bundle; tables are those of the file, with defaults and derived fields. */
export class Manifest {
  /** @param {any} document as the schema has it */
  constructor(document) {
    this.modelId = /** @type {string} */ (document.model_id);
    this.batchSize = /** @type {number} */ (document.batch_size);
    this.batchSizes = /** @type {number[]} */ (document.batch_sizes);
    this.precision = /** @type {string} */ (document.precision);
    this.inputs = /** @type {Input[]} */ (document.inputs.map((/** @type {Input} */ row) => ({ ...row, axes: new Axes(row.shape, row.lookahead) })));
    this.outputs = /** @type {Output[]} */ (document.outputs.map((/** @type {Output} */ row) => ({ ...row, axes: new Axes(row.shape) })));
    this.states = /** @type {State[]} */ (document.states);
    this.programs = /** @type {Program[]} */ (document.programs).filter((program) => program.kind !== "attention"); // programs of bundles of 0.8, which nothing runs
    this.counters = /** @type {Record<string, Counting>} */ (document.counters);
    this.lockstep = document.streams === "lockstep";
    this.joint = /** @type {boolean} */ (document.joint);
    this.exact = document.lengths === "exact";
    this.byRows = document.commits === "rows";
    this.stepwise = /** @type {number | null} */ (document.stepwise);
    this.boundaryToken = /** @type {number | null} */ (document.boundary_token);
    this.weights = /** @type {string} */ (document.weights);
    this.vocabulary = /** @type {string | null} */ (document.vocabulary);
    this.files = /** @type {Record<string, {size: number, sha256: string}>} */ (document.files);
    this.selftest = /** @type {string | null} */ (document.selftest ?? (Object.hasOwn(this.files, "selftest.npz") ? "selftest.npz" : null));
    /** L of all programs of segments, the largest first. */
    this.segmentLengths = [...new Set(this.programs.map((program) => program.segment_length))].filter((length) => length > 0).sort((a, b) => b - a);
    /** The update rules that there are programs of, the fastest first. */
    this.updates = RULES.filter((rule) => this.programs.some((program) => program.update === rule));
    /** The inputs that a caller gives. */
    this.given = this.inputs.filter((entry) => entry.role === "tokens" || entry.role === "feature");
    /** The input of token ids, if a caller gives no other. */
    this.tokens = this.given.length === 1 && this.given[0].role === "tokens" ? this.given[0] : null;
    this.logprobs = this.outputs.find((output) => output.role === "logprobs") ?? null;
    /** V; 0 for a model without tokens. */
    this.vocabSize = this.inputs.find((entry) => entry.vocab)?.vocab ?? 0;
    /** M; 0 for a model without memory rows. */
    this.memoryLength = this.counters.fill?.most ?? 0;
    this.freshFill = this.counters.fill?.start ?? 0;
    this.countsRows = this.counters.fill !== undefined;
  }

  /** Return the state that programs of a rule carry. @param {string} update */
  statesOf(update) {
    const whole = this.updates.includes(update);
    return this.states.filter((state) => state.update === update || (whole && state.update === "replace"));
  }

  /** True if tokens are fed one after the other, as ids [b, T]. */
  get feedsTokens() {
    const { tokens, logprobs } = this;
    if (!tokens || !logprobs || tokens.lookahead) return false;
    return ["B,L", "L,B", "B"].includes(tokens.shape.join()) && alike(logprobs.shape, [...tokens.shape, this.vocabSize]);
  }

  /** Names of the files that running the model needs. */
  get usedFiles() {
    return new Set([this.weights, ...(this.vocabulary ? [this.vocabulary] : []), ...this.programs.map((program) => program.file)]);
  }
}

/**
 * Parse and cross-check a manifest.
 * @param {Uint8Array} bytes
 * @param {string} where its path, for messages
 * @throws {BundleError} it is no manifest of format 2, or contradicts itself
 */
export function readManifest(bytes, where) {
  try {
    if (bytes.length > MOST_BYTES) throw new BundleError(`more than ${MOST_BYTES} bytes, expected the few kilobytes of a manifest; export again`);
    const document = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes), wellFormed);
    const { format, format_version: version } = document ?? {};
    if (format !== "txl-deploy.bundle") throw new BundleError(`format is ${shown(format)}, expected 'txl-deploy.bundle'; export the model again`);
    if (typeof version !== "string" || !/^[1-9]\d*(\.|$)/.test(version) || /^1(\.|$)/.test(version)) {
      throw new BundleError(`format_version is ${shown(version)}, expected e.g. '2.1'; export again`);
    }
    if (!/^2(\.|$)/.test(version)) throw new BundleError(`written in format ${brief(version)}, this version reads up to 2.x; upgrade txl-runtime`);
    hold(document, SCHEMA, "it");
    const found = new Manifest(document);
    if (saysNothing(found)) for (const [side, rows] of Object.entries(implied(found))) rows.forEach((row, at) => Object.assign(/** @type {any} */ (found)[side][at], row));
    check(found);
    return found;
  } catch (error) {
    if (error instanceof RangeError) throw new BundleError(`${where}: nested too deeply for a manifest; export the model again`);
    const said = error instanceof TxlError ? error.message : `${oneLine(error)}; expected the manifest of a bundle; export the model again`;
    throw new BundleError(`${where}: ${said}`);
  }
}

/** Refuse halves of characters. @param {string} key @param {unknown} value */
function wellFormed(key, value) {
  const halved = [key, value].find((text) => typeof text === "string" && /\p{Surrogate}/u.test(text));
  if (halved !== undefined) throw new Error(`${shown(halved)} holds half a character`);
  return value;
}

/** Return whether a value has a type of the schema. @param {any} value @param {string} type */
function isType(value, type) {
  if (type === "integer") return Number.isInteger(value);
  if (type === "object") return value !== null && typeof value === "object" && !Array.isArray(value);
  return type === "array" ? Array.isArray(value) : type === "null" ? value === null : typeof value === type;
}

/**
 * Compare a document with the schema, and fill in the defaults of missing fields.
 * @param {any} value
 * @param {any} schema
 * @param {string} path
 */
function hold(value, schema, path) {
  const must = (/** @type {boolean} */ holds, /** @type {unknown} */ expected) => {
    if (!holds) throw new BundleError(`${path} is ${shown(value)}, expected ${expected}; export the model again`);
  };
  const [isObject, isArray] = [isType(value, "object"), isType(value, "array")];
  if (schema.$ref !== undefined) hold(value, /** @type {any} */ (SCHEMA.$defs)[schema.$ref.split("/").at(-1)], path);
  if (schema.anyOf !== undefined) {
    const failed = /** @type {unknown[]} */ ([]);
    for (const choice of schema.anyOf) {
      try {
        hold(value, choice, path);
        break;
      } catch (error) {
        failed.push(error);
      }
    }
    if (failed.length === schema.anyOf.length) throw failed[0];
  }
  if (schema.const !== undefined) must(value === schema.const, schema.const);
  if (schema.enum !== undefined) must(schema.enum.includes(value), `one of ${schema.enum.join(", ")}`);
  if (schema.type !== undefined) must(isType(value, schema.type), schema.type);
  if (schema.pattern !== undefined) must(new RegExp(schema.pattern).test(value), schema.pattern);
  if (schema.minimum !== undefined) must(value >= schema.minimum, `at least ${schema.minimum}`);
  if (schema.maximum !== undefined) must(value <= schema.maximum, `at most ${schema.maximum}`);
  if (schema.minItems !== undefined) must(value.length >= schema.minItems, `at least ${schema.minItems} entries`);
  if (schema.maxItems !== undefined) must(value.length <= schema.maxItems, `at most ${schema.maxItems} entries`);
  const fixed = schema.prefixItems ?? [];
  if (isArray) value.forEach((/** @type {any} */ each, /** @type {number} */ at) => hold(each, fixed[at] ?? schema.items ?? {}, `${path}[${at}]`));
  if (!isObject) return;
  for (const name of schema.required ?? []) must(Object.hasOwn(value, name), `a field ${name}`);
  for (const [name, inner] of Object.entries(schema.properties ?? {})) {
    if (!Object.hasOwn(value, name) && inner.default !== undefined) value[name] = structuredClone(inner.default);
    if (Object.hasOwn(value, name)) hold(value[name], inner, `${path}.${name}`);
  }
  for (const [name, each] of Object.entries(value)) {
    if (schema.propertyNames !== undefined) hold(name, schema.propertyNames, `${path}.${brief(name)}`);
    if (schema.additionalProperties && !Object.hasOwn(schema.properties ?? {}, name)) hold(each, schema.additionalProperties, `${path}.${brief(name)}`);
  }
}

/** Return whether a manifest has none of the fields that came with format 2.1. @param {Manifest} m */
function saysNothing(m) {
  return !m.inputs.some((row) => row.counter || row.beyond) && !m.outputs.some((row) => row.cluster_columns.length) && !m.states.some((row) => row.spill || row.in_place);
}

/** Return the tables with the fields that the other fields imply. @param {Manifest} m */
function implied(m) {
  const slots = m.states.find((state) => state.slots)?.slots;
  return {
    inputs: m.inputs.map((row) => ({
      ...row,
      counter: row.role === "fill" && m.countsRows ? { start: m.freshFill, most: m.memoryLength, over: "stay" } : row.role === "head" && slots ? { start: 0, most: slots, over: "wrap" } : null,
      beyond: row.role === "valid" ? (m.lockstep ? "largest" : "zero") : null,
    })),
    outputs: m.outputs.map((row) => ({ ...row, cluster_columns: row.clusters.slice(1).map((_, tail) => row.clusters[0][1] + tail) })),
    states: m.states.map((row) => ({
      ...row,
      in_place: row.update === "ring",
      spill: row.update === "ring" && row.slots && row.row_axis !== null ? Math.max((row.shape[row.row_axis] ?? 0) - row.slots, 0) : 0,
    })),
  };
}

/** Return whether a program is a part of the softmax. @param {Program} program */
export function isSoftmax(program) {
  return program.kind === "head" || program.kind.startsWith("tail.");
}

/**
 * Return whether a program's tensor has the state's type and shape; a growing axis may have any size in `rows`.
 * @param {Spec} spec
 * @param {State} state
 */
function takes(spec, state) {
  return spec.dtype === state.dtype && spec.shape.length === state.shape.length && spec.shape.every((size, axis) =>
    axis === state.row_axis && state.rows ? size === "rows" || (Number(size) >= state.rows[0] && Number(size) <= state.rows[1]) : size === state.shape[axis]);
}

/** Refuse tables that contradict each other. @param {Manifest} m */
function check(m) {
  const must = (/** @type {unknown} */ holds, /** @type {string} */ said) => {
    if (!holds) throw new BundleError(`${said.slice(0, 400)}; export the model again`);
  };
  const names = Object.keys(m.files);
  for (const name of [...m.usedFiles, ...(m.selftest ? [m.selftest] : [])]) must(Object.hasOwn(m.files, name), `${brief(name)} is used but not in the list of files`);
  for (const name of names) must(name.split("/").every((part) => PART.test(part)), `file name ${shown(name)} leaves the bundle, or is one that not every system can have`);
  must(new Set(names.map((name) => name.toLowerCase())).size === names.length, "a file name is there twice but for upper and lower case, expected it once");
  const unique = (/** @type {{name: string}[]} */ rows, /** @type {string} */ what) => {
    const seen = new Set();
    const twice = rows.find(({ name }) => seen.size === seen.add(name).size);
    must(!twice, `two ${what} are called ${twice?.name}`);
  };
  unique(m.inputs, "inputs");
  unique(m.outputs, "outputs");
  unique(m.programs, "programs");
  for (const rule of RULES) unique(m.statesOf(rule), `states of rule ${rule}`);
  const segments = m.programs.filter((program) => !isSoftmax(program));
  for (const program of m.programs) {
    must(isSoftmax(program) === (program.update === "none") && isSoftmax(program) === (program.segment_length === 0),
      `program ${program.name} of kind ${program.kind} has update rule ${shown(program.update)} and segments of ${program.segment_length}`);
  }
  must(segments.length, "no program runs segments");
  const carried = new Set(m.states.map((state) => state.input));
  const roles = new Set(m.inputs.map((entry) => entry.role));
  for (const entry of m.inputs) {
    must(!carried.has(entry.name), `${entry.name} is an input and a state`);
    must((entry.role === "tokens") === (entry.vocab !== null), `input ${entry.name} of role ${entry.role} has vocab ${entry.vocab}, expected one for tokens alone`);
    must(!["valid", "fill", "head"].includes(entry.role) || (entry.dtype === "int32" && alike(entry.shape, ["B"])), `input ${entry.name} is ${entry.dtype} ${shown(entry.shape)}, expected a count, int32 ['B']`);
  }
  must(!roles.has("fill") || m.countsRows, "the programs read a fill, but no counter is called fill");
  must(m.freshFill <= m.memoryLength, `counter fill starts at ${m.freshFill}, expected at most ${m.memoryLength}`);
  must(roles.has("valid") || (m.exact && m.lockstep), "sequences are independent or lengths 'valid', but the programs read no valid");
  must(m.lockstep || !m.joint, "sequences are independent and influence one another, expected one of the two");
  must(m.stepwise === null || m.stepwise <= m.segmentLengths[0], `stepwise is ${m.stepwise}, expected at most ${m.segmentLengths[0]}, the positions of the longest segment`);
  must(m.boundaryToken === null || m.boundaryToken < m.vocabSize, `boundary_token is ${m.boundaryToken}, expected an id below ${m.vocabSize}`);
  must(m.batchSizes.every((size, at) => size < [m.batchSize, ...m.batchSizes][at]), `batch_sizes are ${few(m.batchSizes)}, expected smaller ones than B ${m.batchSize}, the largest first`);
  const seen = [...m.inputs, ...m.outputs].some((row) => row.axes.batch >= 0) || m.states.some((state) => state.batch_axis !== null);
  must(seen || m.batchSize <= MOST_UNSEEN, `batch_size is ${m.batchSize}, which no input, output or state has, expected at most ${MOST_UNSEEN}`);
  must(segments.every((program) => program.open_batch || !m.batchSizes.length), "there are several batch_sizes, but a program's graph is of one B");
  must(!m.lockstep || !segments.some((program) => program.kind === "step" && program.open_batch), "sequences run all or none, but a program leaves their number open");
  if (m.logprobs) {
    const { clusters, shape, name, width } = m.logprobs;
    must(!m.vocabSize || shape.at(-1) === m.vocabSize, `${name} has ${shape.at(-1)} columns, expected the ${m.vocabSize} of the vocabulary`);
    const ascend = clusters.every(([first, last], at) => first === (at ? clusters[at - 1][1] : 0) && last > first);
    must(!clusters.length || (ascend && clusters.at(-1)?.[1] === m.vocabSize && width), `clusters ${shown(clusters)} do not ascend within the vocabulary of ${m.vocabSize}`);
  }
  checkStates(m, must);
  checkPrograms(m, must, segments);
  if (!saysNothing(m)) {
    const wanted = implied(m);
    const plain = (/** @type {any} */ rows) => JSON.stringify(rows.map((/** @type {any} */ row) => [row.counter, row.beyond, row.cluster_columns, row.spill, row.in_place].map((value) => (value && value.over ? [value.start, value.most, value.over] : value))));
    for (const side of /** @type {const} */ (["inputs", "outputs", "states"])) must(plain(m[side]) === plain(wanted[side]), `the ${side} say a counter, beyond, cluster_columns, spill or in_place that the other fields do not imply`);
  }
}

/** @param {Manifest} m @param {(holds: unknown, said: string) => void} must */
function checkStates(m, must) {
  const where = "the state table does not fit";
  const begins = new Map(m.states.map(({ name, initial }) => [name, initial]));
  for (const state of m.states) {
    const { name, shape, batch_axis: batch, row_axis: axis, rows, initial } = state;
    const is = `${where}: ${name} is ${shown(shape)} of rule ${state.update}`;
    must(batch === null || shape[batch] === m.batchSize, `${is} with batch axis ${batch}, expected B ${m.batchSize} there`);
    must(axis === null || (axis < shape.length && axis !== batch), `${is} with row axis ${axis}, expected another of its axes`);
    must(!rows || (axis !== null && rows[0] === 0 && rows[1] === shape[axis]), `${is} with ${shown(rows)} rows, expected none up to those of its shape`);
    must(shape.reduce((all, size) => all * size, 1) <= MOST_VALUES, `${is}, expected at most ${MOST_VALUES} values`);
    must(typeof initial !== "number" || Number.isFinite(initial), `${where}: ${name} starts as ${initial}, expected a finite number`);
    must(!counted(state) || (batch === 0 && axis !== null && !rows && !state.absent && state.dtype.includes("float")), `${is}, expected floating memory rows of every sequence, the batch first`);
    must(state.update === "ring" || state.slots === null, `${where}: ${name} has ${state.slots} slots, expected them of a ring alone`);
    must(m.lockstep || counted(state) || (batch !== null && !rows && !state.absent), `sequences are independent, but ${name} is shared, grows or is absent at first`);
    must(begins.get(name) === initial, `${name} starts as two things, expected the same in all rules`);
  }
  const [held, longest] = [new Set(m.states.map((state) => state.update)), m.segmentLengths[0]];
  if (!m.updates.includes("replace")) held.delete("replace"); // such states may accompany memory rows
  must(!m.states.length || alike([...held].sort(), [...m.updates].sort()), `${where}: a rule has states or programs, expected both`);
  must(!m.countsRows || !m.states.length || m.states.some(counted), "counter fill counts memory rows, but the states are replaced, expected it with rolled or ring states");
  const kept = (/** @type {State[]} */ states) => states.filter(counted).map((state) => `${state.name} ${state.dtype} ${without(state.shape, state.batch_axis, state.row_axis)}`);
  const all = new Set(kept(m.states));
  for (const rule of ["ring", "rolled"]) {
    const states = m.statesOf(rule).filter(counted);
    const slots = rule === "ring" ? m.memoryLength + longest : null;
    const rows = slots === null ? m.memoryLength : slots + (longest > 1 ? longest : 0);
    for (const state of states) {
      const fits = state.shape[state.row_axis ?? 0] === rows && state.slots === slots && alike(state.shape, states[0].shape) && state.row_axis === states[0].row_axis && state.dtype === states[0].dtype;
      must(fits, `${where} memory of ${m.memoryLength} rows and segments of ${longest}: ${state.name} of rule ${rule} is ${state.dtype} ${shown(state.shape)} with ${state.slots} slots`);
    }
    must(!states.length || alike(kept(states).sort(), [...all].sort()), `${where}: rule ${rule} keeps other tensors than the bundle's other rules`);
  }
  for (const rule of m.updates) {
    const sides = m.statesOf(rule).map((state) => [state.input, state.output]).sort(([one], [other]) => (one < other ? -1 : 1));
    for (const side of [0, 1]) {
      const listed = sides.map((pair) => pair[side]);
      must(listed.every((name, at) => !at || (name > listed[at - 1] && !name.startsWith(listed[at - 1]))), `${where}: inputs and outputs of rule ${rule} sort differently, or one is a prefix of another`);
    }
  }
}

/** @param {Manifest} m @param {(holds: unknown, said: string) => void} must @param {Program[]} segments */
function checkPrograms(m, must, segments) {
  for (const rule of m.updates) {
    const mine = segments.filter((program) => program.update === rule);
    must(mine.every((program) => program.kind === mine[0].kind) && (rule !== "replace" || mine[0].kind === "step"), `the programs of rule ${rule} are of kinds that it has not together`);
    for (const length of m.segmentLengths) must(mine.some((program) => program.segment_length === length), `program ${mine[0].kind}-${length} is missing`);
  }
  const same = (/** @type {Spec[]} */ found, /** @type {Spec[]} */ wanted) => found.length === wanted.length && found.every((spec, at) => spec.name === wanted[at].name && spec.dtype === wanted[at].dtype && alike(spec.shape, wanted[at].shape));
  const spec = (/** @type {Input | Output} */ row, /** @type {number} */ length) => ({ name: row.name, dtype: row.dtype, shape: row.axes.sizes(m.batchSize, length) });
  for (const program of segments) {
    const [length, what] = [program.segment_length, `program ${program.name}`];
    const read = m.inputs.filter((row) => row.role !== "targets" && (row.role !== "head" || program.update === "ring")).map((row) => spec(row, length));
    const hidden = program.kind === "hidden";
    must(!hidden || m.logprobs?.width, `${what} is 'hidden', but no output says how wide its rows are`);
    const returned = hidden ? [{ name: "hidden", dtype: /** @type {DType} */ ("float32"), shape: [m.batchSize, length, m.logprobs?.width ?? 0] }] : m.outputs.map((row) => spec(row, length));
    let fits = true;
    const [inputs, outputs] = [program.inputs, program.outputs].map((specs) => new Map(specs.map((one) => [one.name, one])));
    for (const state of m.statesOf(program.update)) {
      const [input, output] = [inputs.get(state.input), outputs.get(state.output)];
      fits &&= (input ? takes(input, state) : state.absent || state.rows?.[0] === 0) && output !== undefined && takes(output, state);
      read.push(.../** @type {any[]} */ (input ? [input] : []));
      returned.push(.../** @type {any[]} */ (output ? [output] : []));
    }
    must(fits && same(program.inputs, read) && same(program.outputs, returned), `the inputs or outputs of ${what} do not fit the tables`);
    must(program.name.split(".")[0].endsWith(`-${length}`), `${what} has segments of ${length}, expected them in its name`);
    const other = segments.find((each) => each !== program && each.update === program.update && same(each.inputs, program.inputs));
    must(!other, `${what} takes the same segments as ${other?.name}, expected one program for them`);
  }
  const parts = m.programs.filter(isSoftmax);
  const clusters = m.logprobs?.clusters ?? [];
  const kinds = clusters.map((_, at) => (at ? `tail.${at}` : "head"));
  if (!parts.length && !segments.some((program) => program.kind === "hidden")) return;
  for (const kind of kinds.length ? kinds : ["head"]) must(parts.some((program) => program.kind === kind), `program ${kind} is missing`);
  for (const program of parts) {
    const at = kinds.indexOf(program.kind);
    must(at >= 0, `program ${program.name} is ${shown(program.kind)}, known: ${kinds.join(", ")}`);
    const columns = clusters[at][1] - clusters[at][0] + (at ? 0 : clusters.length - 1);
    const form = (/** @type {string} */ name, /** @type {number} */ size) => [{ name, dtype: /** @type {DType} */ ("float32"), shape: /** @type {Size[]} */ (["rows", size]) }];
    must(same(program.inputs, form("hidden", m.logprobs?.width ?? 0)) && same(program.outputs, form("logprobs", columns)), `the inputs or outputs of program ${program.name} do not fit the output table`);
  }
}
