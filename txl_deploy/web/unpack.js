// @ts-check
/** Begins the page of a single file: its modules become addresses of Blobs, and the bundle and the engine bytes. */

/** @type {{name: string, files: Record<string, string>}} base64 of files packed by gzip */
const packed = JSON.parse(document.getElementById("packed")?.textContent ?? "");
const addresses = /** @type {Map<string, Promise<string>>} */ (new Map());

/** Return a file's bytes. @param {string} name */
async function bytesOf(name) {
  const said = atob(packed.files[name]);
  const data = new Uint8Array(said.length);
  for (let at = 0; at < said.length; at += 1) data[at] = said.charCodeAt(at); // from() with a function takes seconds
  return new Uint8Array(await new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

/** Return the address of a module whose imports are addresses, too. @param {string} name */
async function made(name) {
  let text = new TextDecoder().decode(await bytesOf(name));
  for (const [said, path] of text.matchAll(/from "(\.\.?\/[^"]+)"/g)) {
    const inner = new URL(path, `file:///${name}`).pathname.slice(1);
    text = text.replaceAll(said, `from "${await addressOf(inner)}"`);
  }
  return URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
}

/** Return the address of a module, of which there is one. @param {string} name @returns {Promise<string>} */
function addressOf(name) {
  const found = addresses.get(name) ?? made(name);
  addresses.set(name, found);
  return found;
}

Object.assign(window, {
  packed: async () => {
    const ort = await import(await addressOf("onnxruntime-web/ort.wasm.bundle.min.mjs"));
    ort.env.wasm.wasmBinary = await bytesOf("onnxruntime-web/ort-wasm-simd-threaded.wasm");
    const runtime = await import(await addressOf("txl-runtime/index.js"));
    const names = Object.keys(packed.files).filter((name) => name.startsWith("model/"));
    const bundle = new Map(await Promise.all(names.map(async (name) => /** @type {const} */ ([name.slice("model/".length), await bytesOf(name)]))));
    const worklet = `data:text/javascript,${encodeURIComponent(new TextDecoder().decode(await bytesOf("worklet.js")))}`; // of a file's Blob Chromium takes none
    return { ort, runtime, bundle, name: packed.name, worklet };
  },
});
await import(await addressOf("page.js"));

export {};
