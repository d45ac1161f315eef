// @ts-check
/**
 * The side of JavaScript in javascript.py: segments as lines of input ask for them, in processor time of all threads.
 *
 *     node benchmarks/compare/javascript_side.js MODULES node|wasm BUNDLE UPDATE [first]
 */

import { createInterface } from "node:readline";

import { NdArray, load } from "../../runtime/js/index.js";

const FILES = { node: "onnxruntime-node/dist/index.js", wasm: "onnxruntime-web/dist/ort.wasm.min.mjs" };

/** Return processor time since the process began, in seconds. */
function seconds() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

/** Return arrays for a segment. @param {import("../../runtime/js/index.js").Model} model @param {number} positions */
function inputs(model, positions) {
  return Object.fromEntries(model.manifest.given.map(({ name, dtype, vocab, axes }) => {
    const array = NdArray.zeros(dtype, axes.sizes(model.batchSize, positions));
    array.data.forEach((/** @type {number} */ _, /** @type {number} */ at) => (array.data[at] = vocab ? (at * 7919) % vocab : Math.sin(at)));
    return [name, array];
  }));
}

const [modules, engine, bundle, update, first] = process.argv.slice(2);
const found = await import(`file://${modules}/${FILES[/** @type {"node" | "wasm"} */ (engine)]}`);
const ort = found.InferenceSession ? found : found.default;
if (engine === "wasm") ort.env.wasm.numThreads = 1;
const model = await load(bundle, { ort, threads: 1, update: update || null });
const stream = model.stream();
await stream.run(inputs(model, 1));
if (first) {
  console.log(JSON.stringify({ seconds: seconds(), peak: process.resourceUsage().maxRSS * 1024 }));
  process.exit(0);
}
for await (const line of createInterface({ input: process.stdin })) {
  const { positions, calls } = JSON.parse(line);
  const given = inputs(model, positions);
  await stream.run(given);
  const began = seconds();
  for (let call = 0; call < calls; call += 1) await stream.run(given);
  console.log(JSON.stringify({ seconds: seconds() - began, resident: process.memoryUsage().rss }));
}
process.exit(0);
