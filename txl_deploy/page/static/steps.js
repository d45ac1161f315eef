// @ts-check
/** A model of numbers: inputs from sliders, rows of a file or the microphone, outputs as numbers and lines. */

import { byId, drawn, element } from "./dom.js";
import { chunksOf } from "./microphone.js";

const [MOST, SHOWN] = [24, 400]; // sliders and outputs; steps that are drawn

/** Return the names of a tensor's values at one position: x, or x[0], x[1], … @param {{name: string, shape: any[]}} row */
function namesOf({ name, shape }) {
  const size = shape.filter((one) => typeof one === "number").reduce((all, one) => all * one, 1);
  return size === 1 ? [name] : Array.from({ length: size }, (_, at) => `${name}[${at}]`);
}

/** Return the number of a cell in decimal, NaN of anything else. @param {string} cell */
function numberOf(cell) {
  return /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(cell.trim()) ? Number(cell) : NaN;
}

/** Return the rows of a file, without a first line of names. @param {string} text @param {string[]} names @returns {number[][]} */
function rowsOf(text, names) {
  const lines = text.split(/\r?\n/).filter((line) => line.trim()).map((line) => line.split(/[,;\t]/));
  const first = lines[0]?.every((cell) => Number.isNaN(Number(cell))) ? 1 : 0;
  const wanted = `expected ${names.length} numbers: ${names.slice(0, MOST).join(", ")}`;
  if (lines.length === first) throw new Error(`the file has no rows, ${wanted}`);
  return lines.slice(first).map((cells, at) => {
    const row = cells.map(numberOf);
    const odd = row.findIndex((value) => !Number.isFinite(value));
    if (row.length !== names.length) throw new Error(`row ${at + first + 1} of the file has ${row.length} values, ${wanted}`);
    if (odd >= 0) throw new Error(`row ${at + first + 1} of the file has ${JSON.stringify(cells[odd].slice(0, 40))} as value ${odd + 1}, ${wanted}`);
    return row;
  });
}

/**
 * Show a model.
 * @param {import("./local.js").Local} local
 * @param {(said: string) => void} complain shows what failed
 */
export function showSteps({ model: loaded, runtime, worklet }, complain) {
  /** @type {import("../../../runtime/js/index.js").Model} */ const model = loaded;
  const { manifest } = model;
  const stream = manifest.joint ? model.stream() : model.stream(1);
  const length = manifest.exact ? Math.min(...model.segmentLengths) : 1;
  const inputs = manifest.given.flatMap((entry) => namesOf(entry).map((name) => ({ name, entry })));
  const outputs = manifest.outputs.flatMap((entry) => (namesOf(entry).length > MOST ? [`${entry.name}, root mean square`] : namesOf(entry)));
  const [heard] = manifest.given;
  const chunk = heard ? namesOf(heard).length * (heard.shape.includes("L") ? length : 1) : 0; // samples
  const hears = manifest.given.length === 1 && chunk > MOST && heard.dtype.startsWith("float") && !heard.lookahead;
  let history = /** @type {number[][]} */ ([]);
  let listening = /** @type {AbortController | null} */ (null);

  const sliders = inputs.length > MOST ? [] : inputs.map(({ name, entry }) => {
    const range = entry.vocab ? { min: "0", max: String(entry.vocab - 1), step: "1", value: "0" } : { min: "-1", max: "1", step: "0.01", value: "0" };
    const slider = /** @type {HTMLInputElement} */ (element("input", { type: "range", ...range }));
    const shown = element("output", {}, slider.value);
    slider.addEventListener("input", () => (shown.textContent = slider.value));
    byId("sliders").append(element("label", {}, `${name} `, shown, slider));
    return slider;
  });
  byId("step").hidden = !sliders.length;
  byId("listen").hidden = byId("rate-field").hidden = !hears;

  /** Run one step. @param {ArrayLike<number>[]} values of each input, of all positions or of one, which then hold at all */
  async function step(values) {
    const given = Object.fromEntries(manifest.given.map((entry, at) => {
      const [isWhole, sizes] = [values[at].length > namesOf(entry).length, entry.axes.sizes(stream.batchSize, length)];
      const own = Float64Array.from(values[at], (value) => (entry.dtype === "bool" ? Number(value > 0) : entry.dtype === "int32" ? Math.round(value) : value));
      const shape = sizes.map((size, axis) => (entry.shape[axis] === "B" || (entry.shape[axis] === "L" && !isWhole) ? 1 : size));
      return [entry.name, new runtime.NdArray("float64", shape, own).spread(sizes).as(entry.dtype)];
    }));
    const found = await stream.feed(given, { last: true });
    history.push(manifest.outputs.flatMap((entry) => {
      const { data, shape } = found[entry.name].as("float32");
      const batch = entry.axes.still.batch;
      const each = batch < 0 ? 1 : shape.slice(batch + 1).reduce((/** @type {number} */ all, /** @type {number} */ one) => all * one, 1);
      const own = [...data].filter((_, at) => batch < 0 || Math.floor(at / each) % shape[batch] === 0);
      return own.length > MOST ? [Math.sqrt(own.reduce((sum, value) => sum + value ** 2, 0) / own.length)] : own;
    }));
    history = history.slice(-SHOWN);
  }

  /** Run one step of the values of all inputs in a row. @param {number[]} row */
  function stepOf(row) {
    let first = 0;
    return step(manifest.given.map((entry) => row.slice(first, (first += namesOf(entry).length))));
  }

  /** Return a line of one output's values over the steps. @param {string} name @param {number[]} values */
  function courseOf(name, values) {
    const seen = values.filter(Number.isFinite);
    const [low, high] = [Math.min(...seen), Math.max(...seen)];
    const points = values.map((value, at) => `${at},${(high > low ? 100 - (100 * (value - low)) / (high - low) : 50).toFixed(2)}`);
    const about = { viewBox: `0 -5 ${Math.max(1, values.length - 1)} 110`, preserveAspectRatio: "none", role: "img", "aria-label": `${name} over ${values.length} steps, from ${low.toPrecision(3)} to ${high.toPrecision(3)}` };
    return drawn("svg", about, drawn("polyline", { points: points.join(" ") }));
  }

  function draw() {
    const latest = history.at(-1);
    byId("drawn").textContent = latest ? `${history.length} steps drawn` : "No step yet";
    byId("returned").hidden = !latest;
    const rows = outputs.slice(0, MOST).map((name, at) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, latest?.[at].toPrecision(6) ?? ""), element("td", { class: "course" }, ...(latest ? [courseOf(name, history.map((row) => row[at]))] : []))));
    byId("latest").replaceChildren(...rows);
  }

  /** Run an action while no other can begin, and show its result or its error. @param {(() => Promise<void>)} work */
  function alone(work) {
    const controls = ["step", "file", "begin", "rate"].map(byId);
    for (const control of controls) control.disabled = true;
    complain("");
    work().catch((error) => complain(error instanceof Error ? error.message : String(error))).finally(() => {
      for (const control of controls) control.disabled = false;
      draw();
    });
  }

  /** Run a step for each chunk of what the microphone hears, until the button is pressed again. */
  async function listen() {
    const [rate, began, ending] = [Number(byId("rate").value), performance.now(), (listening = new AbortController())];
    byId("listen").textContent = "Stop";
    let [steps, spent, drawing] = [0, 0, 0];
    try {
      for await (const { chunk: samples, waiting } of chunksOf(worklet, rate, chunk, ending.signal)) {
        const before = performance.now();
        await step([samples]);
        [steps, spent] = [steps + 1, spent + performance.now() - before];
        drawing ||= requestAnimationFrame(() => {
          drawing = 0;
          draw();
          byId("heard").textContent = `${steps} chunks of ${chunk} samples, ${waiting} wait, ${(spent / steps).toFixed(2)} ms each`;
        });
      }
    } finally {
      listening = null;
      cancelAnimationFrame(drawing);
      byId("listen").textContent = "Microphone";
      byId("heard").textContent = `${steps} chunks of ${chunk} samples in ${((performance.now() - began) / 1e3).toFixed(1)} s`;
    }
  }

  byId("one").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    alone(() => stepOf(sliders.map((slider) => Number(slider.value))));
  });
  byId("file").addEventListener("change", () => alone(async () => {
    const [chosen] = byId("file").files;
    if (!chosen) return;
    try {
      const rows = rowsOf(await chosen.text(), inputs.map(({ name }) => name));
      for (const [at, row] of rows.entries()) {
        await stepOf(row);
        if (at % 200 === 199) await new Promise((next) => setTimeout(next)); // lets the page draw
      }
    } finally {
      byId("file").value = ""; // the same file may be chosen again
    }
  }));
  byId("listen").addEventListener("click", () => {
    if (listening) listening.abort();
    else if (byId("rate").reportValidity()) alone(listen);
  });
  byId("begin").addEventListener("click", () => {
    stream.reset();
    history = [];
    draw();
  });
  byId("steps").hidden = false;
  draw();
}
