// @ts-check
/** Where a bundle's files come from: a folder of Node, a URL, or files that the caller has. */

import { BundleError, UsageError, oneLine, shown } from "./errors.js";

/**
 * @typedef {object} Source
 * @property {(name: string) => string} where a file's path, for messages
 * @property {boolean} local whether all files that the manifest lists are there; else only those are read that are used
 * @property {(name: string, most: number) => Promise<Uint8Array>} read at most `most` bytes and one more
 */
/** @typedef {Record<string, Uint8Array | ArrayBuffer | Blob> | Map<string, Uint8Array | ArrayBuffer | Blob>} Files */

const COPY = "copy the bundle again";

/** Return the source of a bundle. @param {string | URL | Files} given a folder's path or URL, or files by name @returns {Promise<Source>} */
export async function sourceOf(given) {
  const isNode = typeof /** @type {any} */ (globalThis).process?.versions?.node === "string";
  if (typeof given === "string" || given instanceof URL) {
    const path = String(given);
    if (/^(https?|blob|data):/i.test(path) || !isNode) return ofUrl(path);
    return ofFolder(path);
  }
  if (given === null || typeof given !== "object") throw new UsageError(`the bundle is given as ${shown(given)}, expected the path or URL of its folder, or its files by name`);
  return ofFiles(given instanceof Map ? given : new Map(Object.entries(given)));
}

/** @param {string} url @returns {Source} */
function ofUrl(url) {
  const page = globalThis.document?.baseURI ?? globalThis.location?.href;
  if (!URL.canParse(url, page)) throw new UsageError(`the bundle is given as ${shown(url)}, expected the URL of its folder`);
  const base = new URL(url, page);
  if (!base.pathname.endsWith("/")) base.pathname += "/";
  const where = (/** @type {string} */ name) => {
    const found = new URL(name.split("/").map(encodeURIComponent).join("/"), base);
    found.search = base.search; // keep a query such as ?v=2, which avoids an older copy in a cache
    return found.href;
  };
  return {
    where,
    local: false,
    async read(name, most) {
      /** @type {Response} */
      let answer;
      try {
        answer = await fetch(where(name));
      } catch (error) {
        throw new BundleError(`${where(name)}: cannot be fetched (${oneLine(error)}), expected a file; serve the bundle's folder`);
      }
      if (!answer.ok || !answer.body) throw new BundleError(`${where(name)}: status ${answer.status}, expected a file; serve the bundle's folder`);
      const parts = /** @type {Uint8Array<ArrayBuffer>[]} */ ([]);
      let size = 0;
      try {
        for (const reader = answer.body.getReader(); size <= most; ) {
          const { value } = await reader.read();
          if (!value) break;
          parts.push(/** @type {Uint8Array<ArrayBuffer>} */ (value));
          size += value.length;
          if (size > most) await reader.cancel(); // the answer is longer than the manifest says
        }
      } catch (error) {
        throw new BundleError(`${where(name)}: ended after ${size} bytes (${oneLine(error)}), expected all of it; load the bundle again`);
      }
      return joined(parts, size);
    },
  };
}

/** @param {Uint8Array[]} parts @param {number} size */
function joined(parts, size) {
  const bytes = new Uint8Array(size);
  parts.reduce((at, part) => (bytes.set(part, at), at + part.length), 0);
  return bytes;
}

/** @param {Map<string, Uint8Array | ArrayBuffer | Blob>} files @returns {Source} */
function ofFiles(files) {
  const where = (/** @type {string} */ name) => name;
  return {
    where,
    local: false,
    async read(name) {
      const found = files.get(name);
      if (found === undefined) throw new BundleError(`${name}: missing, expected it among the files; give all files of the bundle`);
      if (found instanceof Uint8Array) return found;
      if (found instanceof ArrayBuffer) return new Uint8Array(found);
      if (found instanceof Blob) return new Uint8Array(await found.arrayBuffer());
      throw new UsageError(`the file ${shown(name)} is given as ${shown(found)}, expected a Uint8Array, an ArrayBuffer or a Blob`);
    },
  };
}

/** @param {string} given a path, or a file: URL @returns {Promise<Source>} */
async function ofFolder(given) {
  const modules = ["node:fs/promises", "node:path", "node:url"]; // names in variables, so that no bundler looks for them
  const [files, paths, urls] = /** @type {any[]} */ (await Promise.all(modules.map((name) => import(/* @vite-ignore */ name))));
  const path = given.startsWith("file:") ? urls.fileURLToPath(given) : given;
  const root = await files.realpath(path).catch(() => null);
  if (root === null || !(await files.stat(root)).isDirectory()) {
    throw new BundleError(`${path}: found ${root === null ? "nothing" : "a file"}, expected a bundle (a folder); make one with \`txl-deploy export\``);
  }
  const where = (/** @type {string} */ name) => paths.join(path, name);
  return {
    where,
    local: true,
    async read(name, most) {
      const real = await files.realpath(paths.join(root, name)).catch(() => null);
      if (real === null && name === "manifest.json") throw new BundleError(`${path}: no ${name} in it, expected a bundle; make one with \`txl-deploy export\``);
      if (real === null) throw new BundleError(`${where(name)}: missing, expected a file of ${most} bytes; export the model again, or ${COPY}`);
      if (!real.startsWith(root + paths.sep)) throw new BundleError(`${where(name)}: a link that leaves the bundle, expected a plain file; ${COPY}`);
      const facts = await files.stat(real);
      if (!facts.isFile()) throw new BundleError(`${where(name)}: no plain file, expected one of ${most} bytes; ${COPY}`);
      const file = await files.open(real, "r");
      try {
        const bytes = new Uint8Array(Math.min(facts.size, most + 1));
        let size = 0;
        for (let got = -1; got && size < bytes.length; size += got) ({ bytesRead: got } = await file.read(bytes, size, Math.min(bytes.length - size, 2 ** 30), size));
        return bytes.subarray(0, size);
      } catch (error) {
        throw new BundleError(`${where(name)}: ${oneLine(error)}, expected a readable file; ${COPY}`);
      } finally {
        await file.close();
      }
    },
  };
}

/**
 * Read a file and compare it with the manifest's list.
 * @param {Source} source
 * @param {string} name
 * @param {{size: number, sha256: string} | undefined} record
 * @param {boolean} verify whether to compare the hash, too
 */
export async function readChecked(source, name, record, verify) {
  const where = source.where(name);
  if (record === undefined) throw new BundleError(`${where}: is used but not in the list of files; export the model again, or ${COPY}`);
  const bytes = await source.read(name, record.size);
  const found = bytes.length > record.size ? "more" : bytes.length;
  if (bytes.length !== record.size) throw new BundleError(`${where}: ${found} bytes, expected ${record.size}; export the model again, or ${COPY}`);
  if (!verify) return bytes;
  if (globalThis.crypto?.subtle === undefined) {
    throw new BundleError(`${where}: this page has no WebCrypto, expected it to compare the SHA-256; serve the page over https or from localhost, or load with verifyFiles false`);
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {Uint8Array<ArrayBuffer>} */ (bytes)));
  const hex = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (hex !== record.sha256) throw new BundleError(`${where}: its SHA-256 is not the manifest's, the file was altered; export the model again, or ${COPY}`);
  return bytes;
}
