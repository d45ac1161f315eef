// @ts-check
/**
 * A driver of conformance/README.md: one JSON line for each request.
 *
 *     node runtime/js/tests/driver.js --modules FOLDER [--web]
 *
 * FOLDER is a node_modules with onnxruntime-node, and with onnxruntime-web for --web.
 */

import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

import { Driver, requestOf } from "./answers.js";

/** @param {string[]} words of the command @returns {Promise<any>} */
async function ortOf(words) {
  const folder = resolve(words[words.indexOf("--modules") + 1]);
  if (!words.includes("--web")) return (await import(pathToFileURL(join(folder, "onnxruntime-node/dist/index.js")).href)).default;
  const ort = await import(pathToFileURL(join(folder, "onnxruntime-web/dist/ort.wasm.min.mjs")).href);
  ort.env.wasm.numThreads = 1;
  return ort;
}

const { version } = createRequire(import.meta.url)("../package.json");
const driver = new Driver(await ortOf(process.argv.slice(2)), version);
for await (const line of createInterface({ input: process.stdin })) {
  const request = requestOf(line);
  process.stdout.write(`${JSON.stringify({ id: request?.id ?? null, ...(await driver.answer(request)) })}\n`);
}
process.exit(0);
