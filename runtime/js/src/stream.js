// @ts-check
/** Streams, which run segments and carry the state from one to the next. */

import { NdArray, asArray, copyBlock, fitted } from "./arrays.js";
import { adjustment } from "./adjusting.js";
import { UsageError, checkOptions, few, isWhole, shown } from "./errors.js";
import { Ends, Generation, checkStopTexts } from "./generation.js";
import { checkInputs, checkListed, checkRows, checkSegment, checkTokens, clearUncounted, cutsOf, requireTokens } from "./inputs.js";
import { counted } from "./manifest.js";
import { Sampler } from "./sampling.js";
import { StreamState, checkFits, keepsWhole } from "./snapshot.js";
import { States, declared, gathered, parted } from "./states.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./manifest.js").Program} Program */
/** @typedef {ArrayLike<number> | null} Lengths */
/**
 * A segment that ran. `results` are the program's outputs; of a softmax in parts, the rows that it takes.
 * @typedef {{program: Program, results: Map<string, NdArray>, columns: number, counts: Int32Array}} Segment
 */
/**
 * @typedef {object} Drawing
 * @property {number} [temperature] divisor of the log-probabilities; 0 takes the most probable token
 * @property {number | null} [topK] keep the k most probable tokens
 * @property {number | null} [topP] keep the most probable tokens whose share reaches p
 * @property {number | bigint | null} [seed] of the random numbers; null for a fresh one
 * @property {ArrayLike<number>} [stopTokens] ids that end a sequence; they are yielded
 * @property {string[]} [stopTexts] texts that end a sequence; `texts` leaves them out
 * @property {Lengths} [lengths] prompt tokens that count
 * @property {boolean} [logprobs] whether to keep `Generation.logprobs`
 * @property {boolean} [feedLast] feed each token before it is yielded
 * @property {import("./adjusting.js").Adjust | null} [adjust] changes a row before the temperature
 * @property {Map<number, number> | Record<number, number> | null} [logitBias] numbers to add by token id
 * @property {import("./adjusting.js").Allow | null} [allow] the only ids to draw, or a function that returns them
 * @property {Iterable<number>} [forbid] ids that are never drawn
 */

const DRAWING = ["temperature", "topK", "topP", "seed", "stopTokens", "stopTexts", "lengths", "logprobs", "feedLast", "adjust", "logitBias", "allow", "forbid"];

/**
 * The recurrent state of b sequences, made by `Model.stream`. Calls are made one at a time: await each.
 */
export class Stream {
  #model;
  #states;
  #programs;
  #b;
  #most;
  #isBusy = false;
  #changes = 0; // number of changes to the state besides segments; a running `generate` refuses to continue after one

  /** @param {Model} model @param {number} b @param {number} most memory rows that a sequence keeps */
  constructor(model, b, most) {
    this.#model = model;
    this.#b = b;
    this.#most = most;
    this.#programs = model.manifest.programs.filter((program) => program.update === model.update).sort((one, other) => one.segment_length - other.segment_length);
    this.#states = this.#fresh(b);
  }

  /** Return states for b sequences: of B where programs run no fewer. @param {number} b */
  #fresh(b) {
    const { manifest, update, initial } = this.#model;
    return new States(manifest, update, initial, this.#programs.every((program) => program.open_batch) ? b : manifest.batchSize, this.#most);
  }

  /** b, the number of sequences. */
  get batchSize() {
    return this.#b;
  }

  /** The number of memory rows of each sequence, int32 [b]. */
  get fill() {
    return this.#states.fill.slice(0, this.#b);
  }

  /**
   * Run ONE segment of named arrays.
   * @param {Record<string, any>} inputs all inputs of the bundle's table, with b for "B", and T plus look-ahead for "L"
   * @param {{lengths?: Lengths, commit?: boolean}} [options]
   *   lengths: [b], positions that count; 0 leaves a sequence idle. commit: whether the segment becomes part of the state.
   * @returns {Promise<Record<string, NdArray>>} all outputs by name; 0 beyond lengths
   */
  run(inputs, options = {}) {
    return this.#turn(async () => {
      checkOptions("run", options, ["lengths", "commit"]);
      const { arrays, counts, columns } = checkInputs(inputs, options.lengths, this.#model.manifest, this.#b);
      checkSegment(columns, counts, this.#model.manifest);
      const commit = checkFlag(options.commit ?? true, "commit");
      return this.#outputs(counts.some(Boolean) ? await this.#segment(arrays, columns, counts, commit) : null, columns);
    });
  }

  /**
   * Run any number of positions, cut into segments.
   *
   * Tokens, int [b, T] or a text for each sequence, give log-probabilities of the next token, float32 [b, T, V]; arrays by name
   * give outputs as `run` does. With `last`, only each sequence's last position that counts.
   * @param {any} given
   * @param {{lengths?: Lengths, last?: boolean}} [options]
   * @returns {Promise<any>} an NdArray for tokens, else arrays by name
   */
  feed(given, options = {}) {
    return this.#turn(async () => {
      checkOptions("feed", options, ["lengths", "last"]);
      const last = checkFlag(options.last ?? false, "last");
      if (isNamed(given)) return this.#feedNamed(given, options.lengths, last);
      requireTokens(this.#model.manifest, "feed");
      const { ids, counts } = this.#tokens(given, options.lengths, "tokens");
      const [columns, size] = [ids.shape[1], this.#model.manifest.vocabSize];
      if (last) {
        const rows = await this.#feedLast(ids, counts);
        const found = NdArray.zeros("float32", [this.#b, size]);
        rows.forEach((row, at) => row && found.data.set(row, at * size));
        return found;
      }
      const found = NdArray.zeros("float32", [this.#b, columns, size]);
      await this.#each(ids, counts, async (segment, first) => {
        const places = placesOf(segment.counts);
        const rows = await this.#logprobs(segment, places);
        places.forEach(([row, at], index) => found.data.set(rows[index], (row * columns + first + at) * size));
      });
      return found;
    });
  }

  /**
   * Return the negative log-likelihood, in nats, of each token after the first; the last token is only a target.
   * @param {any} tokens int [b, T], or a text for each sequence
   * @param {{lengths?: Lengths}} [options]
   * @returns {Promise<NdArray>} float32 [b, T-1]
   */
  score(tokens, options = {}) {
    return this.#turn(async () => {
      checkOptions("score", options, ["lengths"]);
      requireTokens(this.#model.manifest, "score");
      const { ids, counts } = this.#tokens(tokens, options.lengths, "tokens");
      const steps = ids.shape[1] - 1;
      const found = NdArray.zeros("float32", [this.#b, steps]);
      if (!steps) return found;
      const given = fitted(ids, [this.#b, steps]);
      await this.#each(given, counts.map((own) => Math.max(own - 1, 0)), async (segment, first) => {
        const places = placesOf(segment.counts);
        const rows = await this.#logprobs(segment, places);
        places.forEach(([row, at], index) => (found.data[row * steps + first + at] = -rows[index][ids.data[row * (steps + 1) + first + at + 1]]));
      });
      return found;
    });
  }

  /**
   * Continue a prompt, one token per sequence at a time, with the tokens that Python draws for the same seed.
   *
   * The first token feeds the prompt, and every further one the token before it: the last one is not fed. A sequence that has
   * ended repeats its last token until all have.
   * @param {any} prompt int [b, T], or [T] for a single sequence; or text
   * @param {number} maxNewTokens
   * @param {Drawing} [options]
   * @returns {Generation} an async iterator of int32 [b]
   */
  generate(prompt, maxNewTokens, options = {}) {
    checkOptions("generate", options, DRAWING);
    const { manifest, vocabulary } = this.#model;
    requireTokens(manifest, "generate");
    const isFlat = this.#b === 1 && !isText(prompt) && asArray(prompt, "prompt tokens").shape.length === 1;
    const flat = isFlat ? asArray(prompt, "prompt tokens") : null;
    const { ids, counts } = this.#tokens(flat ? flat.view([1, ...flat.shape]) : prompt, options.lengths, "prompt tokens");
    if (counts.some((own) => own < 1)) throw new UsageError(`lengths are ${few(counts)}, expected at least one prompt token per sequence; where only some go on, take them into a stream of their own and put them back`);
    if (!isWhole(maxNewTokens) || maxNewTokens < 0) throw new UsageError(`maxNewTokens is ${shown(maxNewTokens)}, expected a whole number of at least 0`);
    const adjusted = adjustment(manifest.vocabSize, options);
    const samplers = Array.from(counts, (own, row) => new Sampler(options, row, adjusted, /** @type {Int32Array} */ (ids.row(row).data.subarray(0, own))));
    const stops = checkListed(options.stopTokens ?? [], manifest.vocabSize, "stopTokens");
    const ends = new Ends(this.#b, stops, checkStopTexts(options.stopTexts ?? []), vocabulary);
    const [logprobs, early] = [checkFlag(options.logprobs ?? false, "logprobs"), checkFlag(options.feedLast ?? false, "feedLast")];
    return new Generation(this.#continue(this.#states, ids, counts, maxNewTokens, samplers, ends, logprobs, early), ends);
  }

  /**
   * @param {States} states of the sequences that the prompt is for: `select` puts others in their place
   * @param {NdArray} ids
   * @param {Int32Array} counts
   * @param {number} most
   * @param {Sampler[]} samplers
   * @param {Ends} ends
   * @param {boolean} logprobs
   * @param {boolean} early
   */
  async *#continue(states, ids, counts, most, samplers, ends, logprobs, early) {
    const check = (/** @type {boolean} */ holds) => {
      if (!holds) throw new UsageError("the stream was reset, selected or restored while generating; start generate again");
    };
    check(this.#states === states);
    let rows = await this.#turn(() => this.#feedLast(ids, counts));
    const [token, running, changes] = [new Int32Array(this.#b), new Array(this.#b).fill(true), this.#changes];
    const feed = () => {
      check(this.#changes === changes);
      const fed = Int32Array.from(running, (runs) => (runs || this.#model.manifest.lockstep ? 1 : 0));
      return this.#turn(() => this.#feedLast(new NdArray("int32", [token.length, 1], token.slice()), fed));
    };
    for (let index = 0; index < most; index += 1) {
      if (index && !early) rows = await feed();
      samplers.forEach((sampler, row) => running[row] && (token[row] = sampler.draw(/** @type {Float32Array} */ (rows[row]))));
      if (logprobs) ends.logprobs = Float32Array.from(token, (id, row) => (running[row] ? /** @type {Float32Array} */ (rows[row])[id] : 0));
      if (early) rows = await feed();
      ends.take(token, running, index === most - 1);
      yield token.slice();
      if (!running.some(Boolean)) return;
    }
  }

  /** Return copies of the state by the names and shapes of the bundle's table; memory is float32 with M rows. */
  state() {
    this.#still();
    const { manifest } = this.#model;
    const rolled = manifest.statesOf("rolled");
    const found = gathered(this.#takeAll(), this.#states.table, manifest.memoryLength);
    return Object.fromEntries(this.#states.table.flatMap((state) => {
      const array = found.get(state.name);
      if (array === undefined) return [];
      return [[state.name, counted(state) ? declared(array, rolled.find(({ name }) => name === state.name) ?? state) : array]];
    }));
  }

  /** Return a copy of one sequence's state, to `put` into a stream of the same model, or to save. @param {number} row */
  take(row) {
    this.#still();
    return this.#snapshotOf([this.#states.take(this.#alone(row, "take"))]);
  }

  /** Let one sequence continue from a state of one sequence. @param {number} row @param {StreamState} state */
  put(row, state) {
    this.#still();
    const which = this.#alone(row, "put");
    const { manifest } = this.#model;
    checkFits(state, manifest, this.#states.table, 1);
    this.#changes += 1;
    for (let each = 0; each < this.#states.room; each += 1) if (each === which || manifest.lockstep) this.#states.clear(each);
    this.#states.put(which, partsOf(state, this.#states.table)[0]);
  }

  /** Set sequences to their first state: all, or those named by indices or booleans. @param {ArrayLike<number> | boolean[] | null} [rows] */
  reset(rows = null) {
    this.#still();
    const { manifest } = this.#model;
    const every = Array.from({ length: this.#states.room }, (_, row) => row);
    let which = rows === null ? every : checkRows(rows, this.#b);
    const named = new Set(which).size;
    if (rows !== null && manifest.lockstep && named) {
      if (named < this.#b) throw new UsageError(`reset names sequences ${few(which)}, expected all ${this.#b} or none, because this model's sequences run in lockstep; call reset(), or open a stream for each`);
      which = every;
    }
    this.#changes += 1;
    for (const row of which) this.#states.clear(row);
  }

  /** Make sequence i continue sequence rows[i]; the stream then has as many sequences as are named. @param {ArrayLike<number>} rows */
  select(rows) {
    this.#still();
    const { manifest } = this.#model;
    const which = checkRows(rows, this.#b);
    if (!which.length || which.length > manifest.batchSize) throw new UsageError(`rows name ${which.length} sequences, expected 1 … ${manifest.batchSize}`);
    if (manifest.joint && which.length < manifest.batchSize) throw new UsageError(`rows name ${which.length} sequences, expected ${manifest.batchSize}, because this model's sequences influence one another`);
    const parts = which.map((row) => this.#states.take(row));
    const states = this.#fresh(which.length);
    parts.forEach((part, row) => states.put(row, part));
    this.#changes += 1;
    this.#states = states;
    this.#b = which.length;
  }

  /** Return a copy of the state of all sequences, to go back to or to save. */
  snapshot() {
    this.#still();
    return this.#snapshotOf(this.#takeAll());
  }

  /** Continue from a snapshot; it is checked before anything is changed. @param {StreamState} state */
  restore(state) {
    this.#still();
    checkFits(state, this.#model.manifest, this.#states.table, this.#b);
    this.#changes += 1;
    for (let row = 0; row < this.#states.room; row += 1) this.#states.clear(row);
    partsOf(state, this.#states.table).forEach((part, row) => this.#states.put(row, part));
  }

  #takeAll() {
    return Array.from({ length: this.#b }, (_, row) => this.#states.take(row));
  }

  /** @param {import("./states.js").RowState[]} parts */
  #snapshotOf(parts) {
    const { manifest } = this.#model;
    const { table } = this.#states;
    const fill = Int32Array.from(parts, (part) => part.fill);
    const tensors = gathered(parts, table, Math.max(0, ...fill));
    const of = (/** @type {boolean} */ rows) => new Map(table.flatMap((state) => {
      const tensor = tensors.get(state.name);
      return tensor && counted(state) === rows ? [[state.name, tensor]] : [];
    }));
    const head = manifest.countsRows ? Int32Array.from(parts, (part) => part.head) : null;
    return new StreamState(manifest.modelId, fill, of(true), head, keepsWhole(manifest, table) ? of(false) : null);
  }

  /** Return the index of a sequence that has a state of its own. @param {any} row @param {string} what */
  #alone(row, what) {
    const [which] = checkRows([row], this.#b);
    if (this.#model.manifest.lockstep && this.#b > 1) {
      throw new UsageError(`${what} names one of ${this.#b} sequences, expected a stream of one, because this model's sequences run in lockstep; use snapshot() and restore(...) for all of them`);
    }
    return which;
  }

  /** Throw unless no call is running. */
  #still() {
    if (this.#isBusy) throw new UsageError("a call of the stream is still running, expected one at a time; await it, or open a second stream");
  }

  /** Do something while no other call may. @template T @param {() => Promise<T>} work @returns {Promise<T>} */
  async #turn(work) {
    this.#still();
    this.#isBusy = true;
    try {
      return await work();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Return checked tokens and counts, after encoding text. @param {any} tokens @param {any} lengths @param {string} what */
  #tokens(tokens, lengths, what) {
    const { manifest, vocabulary } = this.#model;
    if (!isText(tokens)) return checkTokens(tokens, lengths, manifest, this.#b, what);
    if (vocabulary === null) throw new UsageError(`tokens are text (${shown(tokens)}), but the bundle has no vocabulary to encode it with, expected token ids; give these, or export with --vocabulary FILE`);
    if (lengths !== undefined && lengths !== null) throw new UsageError(`lengths are ${shown(lengths)}, expected none beside text, which counts whole; leave them out`);
    const texts = typeof tokens === "string" ? [tokens] : tokens;
    if (texts.length !== this.#b) throw new UsageError(`tokens are text (${shown(tokens)}), expected ${this.#b > 1 ? `${this.#b} texts, a list with one for each sequence` : "one text"}`);
    const found = texts.map((/** @type {string} */ text) => vocabulary.encode(text));
    const counts = found.map((/** @type {Int32Array} */ ids) => ids.length);
    if (!counts.some(Boolean)) throw new UsageError("tokens are text without a token, expected at least one token; leave the call out");
    const ids = NdArray.zeros("int32", [this.#b, Math.max(...counts)]);
    found.forEach((/** @type {Int32Array} */ own, /** @type {number} */ row) => ids.data.set(own, row * ids.shape[1]));
    return checkTokens(ids, counts, manifest, this.#b, what);
  }

  /**
   * Feed checked tokens segment by segment.
   * @param {NdArray} ids int32 [b, T]
   * @param {Int32Array} counts
   * @param {(segment: Segment, first: number) => Promise<void>} each
   */
  async #each(ids, counts, each) {
    const { manifest } = this.#model;
    const { name, axes } = /** @type {import("./manifest.js").Input} */ (manifest.tokens);
    for (const cut of cutsOf(ids.shape[1], counts, manifest)) {
      const columns = cut.end - cut.first;
      const piece = NdArray.zeros("int32", [this.#b, columns]);
      copyBlock(piece, [0, 0], ids, [0, cut.first], piece.shape);
      const array = NdArray.zeros("int32", axes.sizes(this.#b, columns));
      for (let row = 0; row < this.#b; row += 1) {
        for (let at = 0; at < cut.counts[row]; at += 1) array.data[axes.batch === 0 ? row * columns + at : at * this.#b + row] = piece.data[row * columns + at];
      }
      await each(await this.#segment(new Map([[name, array]]), columns, cut.counts, true), cut.first);
    }
  }

  /** Feed checked tokens; return log-probabilities [V] of each sequence's last position that counts. @param {NdArray} ids @param {Int32Array} counts */
  async #feedLast(ids, counts) {
    const found = /** @type {(Float32Array | null)[]} */ (new Array(this.#b).fill(null));
    await this.#each(ids, counts, async (segment, first) => {
      const ending = Array.from(counts).flatMap((own, row) => (segment.counts[row] && own === first + segment.counts[row] ? [row] : []));
      const rows = await this.#logprobs(segment, ending.map((row) => [row, segment.counts[row] - 1]));
      ending.forEach((row, index) => (found[row] = rows[index]));
    });
    return found;
  }

  /** @param {Record<string, any>} given @param {any} lengths @param {boolean} last */
  async #feedNamed(given, lengths, last) {
    const { manifest } = this.#model;
    const { arrays, counts, columns } = checkInputs(given, lengths, manifest, this.#b);
    const cuts = cutsOf(columns, counts, manifest);
    const wide = cuts.length > 1 && [...manifest.given, ...manifest.outputs].find((entry) => entry.axes.positions.length > 1);
    if (wide) throw new UsageError(`${wide.name} has shape ${shown(wide.shape)}, expected one axis of positions to cut along; run its segments one by one with run({...})`);
    const found = Object.fromEntries(manifest.outputs.map((output) => [output.name, NdArray.zeros(output.dtype, (last ? output.axes.still : output.axes).sizes(this.#b, columns))]));
    for (const { first, end, counts: inside } of cuts) {
      const piece = new Map(manifest.given.map(({ name, axes }) => {
        const array = /** @type {NdArray} */ (arrays.get(name));
        if (!axes.positions.length) return [name, clearUncounted(axes, array.copy(), inside)];
        const part = NdArray.zeros(array.dtype, axes.sizes(this.#b, end - first));
        copyBlock(part, part.shape.map(() => 0), array, part.shape.map((_, axis) => (axes.positions.includes(axis) ? first : 0)), part.shape);
        return [name, clearUncounted(axes, part, inside)];
      }));
      const some = await this.#outputs(await this.#segment(piece, end - first, inside, true), end - first);
      for (const { name, axes } of manifest.outputs) place(axes, some[name], found[name], first, inside, last);
    }
    return found;
  }

  /**
   * Run one segment of checked arrays.
   * @param {Map<string, NdArray>} arrays with zeros where nothing counts
   * @param {number} columns T
   * @param {Int32Array} counts [b], not all of them 0
   * @param {boolean} commit
   * @returns {Promise<Segment>}
   */
  async #segment(arrays, columns, counts, commit) {
    const { manifest, engine } = this.#model;
    const states = this.#states;
    const program = this.#programs.find((one) => one.segment_length >= columns && (!manifest.exact || one.segment_length === columns) && this.#takes(one));
    if (program === undefined) throw new UsageError(`no program takes segments of ${columns} and the states as they are, expected a state that one takes; reset the stream`);
    const valid = new Int32Array(states.room);
    const inputs = /** @type {Map<string, NdArray>} */ (new Map());
    for (const { name, role, axes, beyond } of manifest.inputs) {
      const array = arrays.get(name);
      if (array !== undefined) inputs.set(name, fitted(array, axes.sizes(states.room, program.segment_length)));
      if (role === "valid" && beyond === "largest") valid.fill(Math.max(...counts));
      const counter = role === "valid" ? valid : role === "fill" ? states.fill : role === "head" ? states.head : null;
      if (counter !== null && program.inputs.some((spec) => spec.name === name)) inputs.set(name, new NdArray("int32", [states.room], counter));
    }
    valid.set(counts);
    const shared = /** @type {Map<string, string>} */ (new Map());
    for (const state of states.table) {
      const array = states.arrays.get(state.input);
      if (array !== undefined && program.inputs.some((spec) => spec.name === state.input)) inputs.set(state.input, array);
      if (state.in_place) shared.set(state.output, state.input);
    }
    const results = await engine.run(program, inputs, shared);
    if (commit) states.commit(results, valid);
    return { program, results, columns, counts };
  }

  /** Return whether a program takes the states' present shapes. @param {Program} program */
  #takes(program) {
    return this.#states.table.every((state) => {
      const [array, spec] = [this.#states.arrays.get(state.input), program.inputs.find(({ name }) => name === state.input)];
      if (spec === undefined) return array === undefined || array.shape.includes(0);
      return array !== undefined && spec.shape.every((size, axis) => size === "rows" || axis === state.batch_axis || size === array.shape[axis]);
    });
  }

  /** Return the outputs of a segment by name, zero where nothing counts. @param {Segment | null} segment @param {number} columns */
  async #outputs(segment, columns) {
    const found = /** @type {Record<string, NdArray>} */ ({});
    for (const { name, dtype, axes, role } of this.#model.manifest.outputs) {
      if (segment === null) {
        found[name] = NdArray.zeros(dtype, axes.sizes(this.#b, columns));
      } else if (segment.program.kind === "hidden" && role === "logprobs") {
        const array = (found[name] = NdArray.zeros(dtype, axes.sizes(this.#b, columns)));
        const [places, size] = [placesOf(segment.counts), array.shape[array.shape.length - 1]];
        const rows = await this.#logprobs(segment, places);
        places.forEach(([row, at], index) => array.data.set(rows[index], (row * columns + at) * size));
      } else {
        const array = fitted(/** @type {NdArray} */ (segment.results.get(name)), axes.sizes(this.#b, columns));
        found[name] = segment.counts.every((own) => own === columns) ? array : clearUncounted(axes, array, segment.counts);
      }
    }
    return found;
  }

  /** Return log-probabilities [V] at some places of a segment. @param {Segment} segment @param {[number, number][]} places sequence and position @returns {Promise<Float32Array[]>} */
  async #logprobs({ program, results }, places) {
    const output = /** @type {import("./manifest.js").Output} */ (this.#model.manifest.logprobs);
    if (program.kind !== "hidden") {
      const found = /** @type {NdArray} */ (results.get(output.name)).as("float32");
      const size = found.shape[found.shape.length - 1];
      const [b, length] = [found.shape[output.axes.batch], output.axes.positions.length ? found.shape[output.axes.positions[0]] : 1];
      return places.map(([row, at]) => {
        const first = (output.axes.batch === 0 ? row * length + at : at * b + row) * size;
        return /** @type {Float32Array} */ (found.data.subarray(first, first + size));
      });
    }
    const hidden = /** @type {NdArray} */ (results.get("hidden"));
    const [, length, width] = hidden.shape;
    const rows = NdArray.zeros("float32", [places.length, width]);
    places.forEach(([row, at], index) => rows.data.set(hidden.data.subarray((row * length + at) * width, (row * length + at + 1) * width), index * width));
    return places.length ? this.#softmax(rows) : [];
  }

  /** Put the softmax of rows together of its parts. @param {NdArray} rows [n, F] @returns {Promise<Float32Array[]>} [V] each */
  async #softmax(rows) {
    const { manifest, engine } = this.#model;
    const { clusters, cluster_columns: columns } = /** @type {import("./manifest.js").Output} */ (manifest.logprobs);
    const part = async (/** @type {string} */ kind) => {
      const program = /** @type {Program} */ (manifest.programs.find((one) => one.kind === kind));
      return /** @type {NdArray} */ ((await engine.run(program, new Map([[program.inputs[0].name, rows]]))).get(program.outputs[0].name));
    };
    const head = await part("head");
    if (clusters.length === 1) return Array.from({ length: rows.shape[0] }, (_, row) => /** @type {Float32Array} */ (head.row(row).data));
    const found = Array.from({ length: rows.shape[0] }, (_, row) => {
      const whole = new Float32Array(manifest.vocabSize);
      whole.set(head.row(row).data.subarray(0, clusters[0][1]));
      return whole;
    });
    for (let tail = 1; tail < clusters.length; tail += 1) {
      const words = await part(`tail.${tail}`);
      found.forEach((whole, row) => {
        const own = head.row(row).data[columns[tail - 1]];
        words.row(row).data.forEach((/** @type {number} */ value, /** @type {number} */ at) => (whole[clusters[tail][0] + at] = own + value));
      });
    }
    return found;
  }
}

/** Return sequence and position of each position that counts. @param {Int32Array} counts @returns {[number, number][]} */
function placesOf(counts) {
  return Array.from(counts).flatMap((own, row) => Array.from({ length: own }, (_, at) => /** @type {[number, number]} */ ([row, at])));
}

/** Return the sequences of a checked snapshot. @param {StreamState} state @param {import("./manifest.js").State[]} table */
function partsOf(state, table) {
  return parted(new Map([...state.memory, ...(state.states ?? [])]), table, state.fill, state.head ?? new Int32Array(state.batchSize));
}

/** Return whether something is text instead of token ids. @param {any} tokens */
function isText(tokens) {
  return typeof (Array.isArray(tokens) ? tokens[0] : tokens) === "string";
}

/** Return whether something is an object of arrays by name, one of which may be called data, and no array. @param {any} given */
function isNamed(given) {
  const isArray = Array.isArray(given) || ArrayBuffer.isView(given) || (ArrayBuffer.isView(given?.data) && (given.shape ?? given.dims) !== undefined);
  return given !== null && typeof given === "object" && !isArray;
}

/** @param {any} value @param {string} what @returns {boolean} */
function checkFlag(value, what) {
  if (typeof value !== "boolean") throw new UsageError(`${what} is ${shown(value)}, expected true or false`);
  return value;
}

/**
 * Copy a segment's output to its positions in the whole result.
 * @param {import("./manifest.js").Axes} axes
 * @param {NdArray} found
 * @param {NdArray} result
 * @param {number} first
 * @param {Int32Array} counts
 * @param {boolean} last whether the result has each sequence's last position alone
 */
function place(axes, found, result, first, counts, last) {
  const still = axes.positions.length > 0 && last;
  const rows = axes.batch < 0 ? [-1] : Array.from(counts).flatMap((own, row) => (own ? [row] : []));
  for (const row of rows) {
    const end = row < 0 ? Math.max(...counts) : counts[row];
    const size = found.shape.map((all, axis) => (axis === axes.batch ? 1 : still && axes.positions.includes(axis) ? 1 : all));
    const from = size.map((_, axis) => (axis === axes.batch ? row : still && axes.positions.includes(axis) ? end - 1 : 0));
    const to = size.map((_, axis) => (axis === axes.batch ? row : !last && axes.positions.includes(axis) ? first : 0));
    const whole = still ? result.view(found.shape.map((all, axis) => (axes.positions.includes(axis) ? 1 : axis === axes.batch ? counts.length : all))) : result;
    copyBlock(whole, to, found, from, size);
  }
}
