// @ts-check
/** The arrays of a stream's state and its counters: how sequences are cleared, taken out and put in. */

import { NdArray, alike, clearBlock, copyBlock, count, inserted, without } from "./arrays.js";
import { counted } from "./manifest.js";

/** @typedef {import("./manifest.js").State} State */
/** @typedef {import("./manifest.js").Manifest} Manifest */
/**
 * The state of one sequence: memory rows float32 [fill, …], the oldest first; replaced states without the axis of sequences.
 * @typedef {{fill: number, head: number, tensors: Map<string, NdArray>}} RowState
 */

/** The state of `room` sequences in the arrays that programs read. */
export class States {
  /**
   * @param {Manifest} manifest
   * @param {string} update
   * @param {Map<string, NdArray | null>} initial first values by name; null of zeros
   * @param {number} room sequences that programs run
   * @param {number} most memory rows that a sequence keeps
   */
  constructor(manifest, update, initial, room, most) {
    this.table = manifest.statesOf(update);
    this.room = room;
    this.most = most;
    this.memoryLength = manifest.memoryLength;
    this.start = Math.min(manifest.freshFill, most);
    this.initial = initial;
    /** R of a ring; 0 without one. */
    this.slots = this.table.find((state) => state.slots)?.slots ?? 0;
    this.fill = new Int32Array(room);
    this.head = new Int32Array(room);
    /** Arrays by the states' inputs; an absent one is left out. @type {Map<string, NdArray>} */
    this.arrays = new Map();
    for (let row = 0; row < room; row += 1) this.clear(row);
  }

  /** Return the size of a state in the arrays of `room` sequences, with other rows if it grows. @param {State} state @param {number} [rows] */
  shapeOf(state, rows) {
    return state.shape.map((size, axis) => (axis === state.batch_axis ? this.room : axis === state.row_axis && rows !== undefined ? rows : size));
  }

  /** Set one sequence to its first state. @param {number} row */
  clear(row) {
    this.fill[row] = this.start;
    this.head[row] = 0;
    for (const state of this.table) {
      const shape = this.shapeOf(state, state.rows?.[0]);
      let array = this.arrays.get(state.input);
      if (state.absent) {
        this.arrays.delete(state.input);
        continue;
      }
      if (array === undefined || !alike(array.shape, shape)) this.arrays.set(state.input, (array = NdArray.zeros(state.dtype, shape)));
      const first = this.initial.get(state.name) ?? null;
      const at = shape.map((_, axis) => (axis === state.batch_axis ? row : 0));
      const size = shape.map((all, axis) => (axis === state.batch_axis ? 1 : all));
      if (first === null) clearBlock(array, at, size);
      else copyBlock(array, at, first.view(counted(state) ? this.rowShape(state) : inserted(first.shape, state.batch_axis, 1)).spread(size), size.map(() => 0), size);
    }
  }

  /** Return the shape of one row of one sequence, with size 1 on the axes of sequences and rows. @param {State} state */
  rowShape(state) {
    return state.shape.map((size, axis) => (axis === state.batch_axis || axis === state.row_axis ? 1 : size));
  }

  /** Return where memory rows stand in the array, the oldest first. @param {State} state @param {number} row */
  #places(state, row) {
    const fill = this.fill[row];
    return Array.from({ length: fill }, (_, at) =>
      state.update === "ring" ? (((this.head[row] - fill + at) % this.slots) + this.slots) % this.slots : this.memoryLength - fill + at);
  }

  /**
   * Call with each memory row of a sequence: a view of row `at` of [fill, …], and its place in the array.
   * @param {State} state
   * @param {number} row
   * @param {NdArray} rows
   * @param {(one: NdArray, place: number[], size: number[]) => void} visit
   */
  #eachRow(state, row, rows, visit) {
    const size = this.rowShape(state);
    this.#places(state, row).forEach((place, at) =>
      visit(rows.row(at).view(size), size.map((_, axis) => (axis === state.batch_axis ? row : axis === state.row_axis ? place : 0)), size));
  }

  /** Return a copy of one sequence's state. @param {number} row @returns {RowState} */
  take(row) {
    const tensors = /** @type {Map<string, NdArray>} */ (new Map());
    for (const state of this.table) {
      const array = this.arrays.get(state.input);
      if (array === undefined) continue;
      if (counted(state)) {
        const rows = NdArray.zeros(state.dtype, [this.fill[row], ...without(state.shape, state.batch_axis, state.row_axis)]);
        this.#eachRow(state, row, rows, (one, place, size) => copyBlock(one, size.map(() => 0), array, place, size));
        tensors.set(state.name, rows.as("float32"));
      } else if (state.batch_axis === null) {
        tensors.set(state.name, array.copy());
      } else {
        const size = array.shape.map((all, axis) => (axis === state.batch_axis ? 1 : all));
        const found = NdArray.zeros(state.dtype, size);
        copyBlock(found, size.map(() => 0), array, size.map((_, axis) => (axis === state.batch_axis ? row : 0)), size);
        tensors.set(state.name, found.view(without(size, state.batch_axis)));
      }
    }
    return { fill: this.fill[row], head: this.head[row], tensors };
  }

  /** Set a cleared sequence to a state that was taken. @param {number} row @param {RowState} found */
  put(row, found) {
    this.fill[row] = Math.min(found.fill, this.most);
    this.head[row] = this.slots ? ((found.head % this.slots) + this.slots) % this.slots : 0;
    for (const state of this.table) {
      const given = found.tensors.get(state.name);
      if (given === undefined) {
        this.arrays.delete(state.input);
      } else if (counted(state)) {
        const array = /** @type {NdArray} */ (this.arrays.get(state.input));
        const each = count(given.shape.slice(1));
        const newest = new NdArray(given.dtype, [this.fill[row], ...given.shape.slice(1)], given.data.subarray((found.fill - this.fill[row]) * each));
        this.#eachRow(state, row, newest.as(state.dtype), (one, place, size) => copyBlock(array, place, one, size.map(() => 0), size));
      } else if (state.batch_axis === null) {
        this.arrays.set(state.input, given.copy());
      } else {
        const shape = inserted(given.shape, state.batch_axis, this.room);
        let array = this.arrays.get(state.input);
        if (array === undefined || !alike(array.shape, shape)) this.arrays.set(state.input, (array = NdArray.zeros(state.dtype, shape)));
        const size = inserted(given.shape, state.batch_axis, 1);
        copyBlock(array, size.map((_, axis) => (axis === state.batch_axis ? row : 0)), given.view(size), size.map(() => 0), size);
      }
    }
  }

  /**
   * Commit a step: take the arrays that it returned, and move the counters on.
   * @param {Map<string, NdArray>} results by the programs' outputs
   * @param {Int32Array} valid [room]
   */
  commit(results, valid) {
    for (const state of this.table) this.arrays.set(state.input, /** @type {NdArray} */ (results.get(state.output)));
    for (let row = 0; row < this.room; row += 1) {
      this.fill[row] = Math.min(this.fill[row] + valid[row], this.most);
      if (!this.slots) continue;
      this.head[row] += valid[row];
      if (this.head[row] < this.slots) continue;
      this.head[row] -= this.slots;
      for (const state of this.table) if (state.slots) this.#spill(state, row, this.head[row]);
    }
  }

  /** Copy the rows that a step wrote behind a ring's slots to its first ones. @param {State} state @param {number} row @param {number} rows */
  #spill(state, row, rows) {
    const array = /** @type {NdArray} */ (this.arrays.get(state.input));
    const at = (/** @type {number} */ slot) => state.shape.map((_, axis) => (axis === state.batch_axis ? row : axis === state.row_axis ? slot : 0));
    const size = state.shape.map((all, axis) => (axis === state.batch_axis ? 1 : axis === state.row_axis ? rows : all));
    copyBlock(array, at(0), array, at(this.slots), size);
  }
}

/** Return the axes of a state as snapshots have it: memory [b, rows, …], else its own. @param {State} state */
export function takenAxes(state) {
  if (!counted(state)) return { shape: state.shape, batch: state.batch_axis, rows: state.rows ? state.row_axis : null };
  return { shape: [0, 0, ...without(state.shape, state.batch_axis, state.row_axis)], batch: 0, rows: 1 };
}

/**
 * Join the states of sequences, by name: memory rows stand last, with zeros before them.
 * @param {RowState[]} parts
 * @param {State[]} table
 * @param {number} rows memory rows in the result
 */
export function gathered(parts, table, rows) {
  const found = /** @type {Map<string, NdArray>} */ (new Map());
  for (const state of table) {
    const { batch } = takenAxes(state);
    parts.forEach((part, row) => {
      const own = part.tensors.get(state.name);
      if (own === undefined) return;
      if (batch === null) return found.set(state.name, own);
      const inner = counted(state) ? [rows, ...own.shape.slice(1)] : own.shape;
      if (!found.has(state.name)) found.set(state.name, NdArray.zeros(own.dtype, inserted(inner, batch, parts.length)));
      const [whole, size] = [/** @type {NdArray} */ (found.get(state.name)), inserted(own.shape, batch, 1)];
      copyBlock(whole, size.map((_, axis) => (axis === batch ? row : axis === 1 && counted(state) ? rows - part.fill : 0)), own.view(size), size.map(() => 0), size);
    });
  }
  return found;
}

/** Return memory [b, M, …] in the order of axes that a state's table has. @param {NdArray} array @param {State} state */
export function declared(array, state) {
  const [b, rows, ...rest] = array.shape;
  const [batch, axis] = [state.batch_axis, state.row_axis];
  if (batch === 0 && axis === 1) return array;
  const unit = state.shape.map((size, at) => (at === batch || at === axis ? 1 : size));
  const found = NdArray.zeros(array.dtype, unit.map((size, at) => (at === batch ? b : at === axis ? rows : size)));
  const each = array.view([b * rows, ...rest]);
  for (let at = 0; at < b * rows; at += 1) {
    const place = unit.map((_, side) => (side === batch ? Math.floor(at / rows) : side === axis ? at % rows : 0));
    copyBlock(found, place, each.row(at).view(unit), unit.map(() => 0), unit);
  }
  return found;
}

/**
 * Return the states of single sequences from what `gathered` returned.
 * @param {Map<string, NdArray>} tensors
 * @param {State[]} table
 * @param {Int32Array} fill
 * @param {Int32Array} head
 * @returns {RowState[]}
 */
export function parted(tensors, table, fill, head) {
  return Array.from(fill, (own, row) => ({
    fill: own,
    head: head[row],
    tensors: new Map(table.flatMap((state) => {
      const whole = tensors.get(state.name);
      if (whole === undefined) return [];
      const { batch } = takenAxes(state);
      if (batch === null) return [[state.name, whole]];
      const inner = without(whole.shape, batch);
      const shape = counted(state) ? [own, ...inner.slice(1)] : inner;
      const part = NdArray.zeros(whole.dtype, inserted(shape, batch, 1));
      copyBlock(part, part.shape.map(() => 0), whole, part.shape.map((_, axis) => (axis === batch ? row : axis === 1 && counted(state) ? whole.shape[1] - own : 0)), part.shape);
      return [[state.name, part.view(shape)]];
    })),
  }));
}
