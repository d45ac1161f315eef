// @ts-check
/** txl-runtime: bundles of txl-deploy in a browser and in Node. */

export { NdArray } from "./src/arrays.js";
export { BackendError, BundleError, CheckError, TxlError, UnsupportedError, UsageError } from "./src/errors.js";
export { Generation } from "./src/generation.js";
export { Model, load } from "./src/model.js";
export { SelftestResult } from "./src/selftest.js";
export { StreamState } from "./src/snapshot.js";
export { Stream } from "./src/stream.js";
