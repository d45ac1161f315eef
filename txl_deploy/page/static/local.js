// @ts-check
/** The model itself, in the place of a server: it answers as `Server` does, and its sessions are saved states. */

import { Refused } from "./server.js";

/**
 * @typedef {import("../../../runtime/js/index.js").Model} Model
 * @typedef {{state: import("../../../runtime/js/index.js").StreamState | null, pending: number | null, seen: number}} Session
 *     `pending` is the last drawn token, which the next request feeds first
 * @typedef {{ort: any, runtime: any, bundle: any, name: string, worklet: string}} Packed what stands beside the page, or in it
 */

const MOST = 1 << 20; // tokens of one request

/** Return what a folder has. @returns {Promise<Packed>} */
async function fetched() {
  const places = ["./onnxruntime-web/ort.wasm.min.mjs", "./txl-runtime/index.js"].map((place) => new URL(place, document.baseURI).href);
  const [ort, runtime] = await Promise.all(places.map((place) => import(place)));
  const { models } = await (await fetch("./txl-package.json")).json();
  return { ort, runtime, bundle: "./model", name: models[0], worklet: "./worklet.js" };
}

export class Local {
  constructor() {
    /** @type {any} txl-runtime */ this.runtime = null;
    /** @type {any} */ this.model = null;
    this.worklet = "";
    /** @type {Map<string, Session>} */ this._sessions = new Map();
    this._cancelled = "";
  }

  /** Load the model, and describe it as GET /v1/models does. */
  async about() {
    const { ort, runtime, bundle, name, worklet } = await (/** @type {any} */ (window).packed ?? fetched)(); // a single file has all of it inside
    ort.env.wasm.numThreads = 1; // more need headers that a folder's server seldom sends
    /** @type {Model} */ const model = await runtime.load(bundle, { ort });
    [this.model, this.runtime, this.worklet] = [model, runtime, worklet];
    const { manifest, vocabulary, memoryLength: memory_length, segmentLengths: segment_lengths } = model;
    const isText = manifest.feedsTokens && manifest.byRows && !manifest.joint;
    return {
      id: name, model_id: manifest.modelId, precision: manifest.precision, memory_length, segment_lengths, engine: model.engine.description,
      reads_text: vocabulary !== null, vocab_size: manifest.vocabSize, inputs: manifest.given, outputs: isText ? manifest.outputs : [],
      limits: { prompt_tokens: MOST, max_tokens: MOST, body_bytes: Infinity, logprobs: MOST, answer_logprobs: Infinity },
    };
  }

  async open() {
    return { tab: "page" };
  }

  /** @param {string} text @returns {Promise<number[]>} */
  async tokenize(text) {
    return [...this.model.vocabulary.encode(text)];
  }

  /** @param {number[]} ids @returns {Promise<string>} */
  async textOf(ids) {
    return new TextDecoder().decode(this.model.vocabulary.decode(ids));
  }

  /** Copy a session: states are never changed, so both have the same one. @param {string} from @param {string} to */
  async copy(from, to) {
    this._sessions.set(to, { ...this._found(from) });
  }

  /** @param {string} session */
  async end(session) {
    this._sessions.delete(session);
  }

  /** @param {string} session @returns {Promise<{seen: number, fill: number | null}>} */
  async info(session) {
    const { state, seen } = this._found(session);
    return { seen, fill: this.model.memoryLength === null ? null : (state?.fill[0] ?? 0) };
  }

  /** @param {string} session */
  async cancel(session) {
    this._cancelled = session;
  }

  /** @param {string} session */
  _found(session) {
    const found = this._sessions.get(session);
    if (!found) throw new Refused(404, "there is no such state in this page", "session_not_found");
    return found;
  }

  /**
   * Yield the tokens of a completion as they come.
   * @param {any} body of POST /v1/completions
   * @param {AbortSignal} [signal]
   * @returns {AsyncGenerator<{tokens: import("./story.js").Token[], seen: number}, void, void>}
   */
  async *complete({ prompt, max_tokens, memory_length = null, logprobs, echo = false, session = "", ...drawing }, signal) {
    /** @type {Model} */ const model = this.model;
    const { manifest, vocabulary } = model;
    let { pending, seen, ...before } = this._sessions.get(session) ?? { state: null, pending: null, seen: 0 };
    let given = typeof prompt === "string" ? (prompt ? [...(vocabulary?.encode(prompt) ?? [])] : []) : prompt;
    if (!given.length && pending === null) {
      if (manifest.boundaryToken === null) throw new Error("the text is empty and the bundle has no boundary token to begin with, expected at least one token; write some");
      given = [manifest.boundaryToken];
    }
    const [own, stream, [longest]] = [pending === null ? 0 : 1, model.stream(1, memory_length), manifest.segmentLengths];
    const tell = async (/** @type {import("./story.js").Token[]} */ tokens) => {
      await new Promise((next) => setTimeout(next)); // lets the page draw, and Stop be pressed
      signal?.throwIfAborted();
      if (session && this._cancelled === session) throw new Refused(200, "the request was cancelled", "cancelled");
      return { tokens, seen };
    };
    this._cancelled = "";
    try {
      if (before.state) stream.put(0, before.state);
      const ids = pending === null ? given : [pending, ...given];
      /** @type {number[]} */ let piece = [];
      /** @type {ArrayLike<number> | null} */ let row = null; // the log-probabilities after the token before
      for (let first = 0; first < ids.length; first += longest) { // as the stream would cut them
        piece = ids.slice(first, first + longest);
        const draws = max_tokens > 0 && first + longest >= ids.length; // from here: a copy reads what the stream reads when it draws
        const reader = draws ? model.stream(1, memory_length) : stream;
        if (draws) reader.put(0, stream.take(0));
        const rows = (await reader.feed([piece])).row(0);
        if (!draws) [pending, seen] = [null, seen + piece.length];
        const tokens = [];
        for (const [at, id] of piece.entries()) {
          if (first + at >= own) tokens.push(this._token(id, row, logprobs));
          row = rows.row(at).data;
        }
        yield await tell(echo ? tokens : []);
      }
      const { temperature, top_k: topK, top_p: topP, seed } = drawing;
      const adjust = (/** @type {Float64Array} */ found) => (row = found);
      let due = piece.length; // positions that the next draw feeds
      for await (const [id] of max_tokens ? stream.generate(piece, max_tokens, { temperature, topK, topP, seed, adjust }) : []) {
        [pending, seen, due] = [id, seen + due, 1];
        yield await tell([this._token(id, row, logprobs)]);
      }
    } finally {
      if (session) this._sessions.set(session, { state: stream.take(0), pending, seen });
    }
  }

  /** Return a token with the most probable ones at its place. @param {number} id @param {ArrayLike<number> | null} row [V] @param {number} most of them */
  _token(id, row, most) {
    const best = row && most ? bestOf(row, most, id).map((other) => ({ id: other, name: this._name(other), logprob: row[other] })) : [];
    return { id, name: this._name(id), logprob: row && row[id], best, drawn: false, by: null };
  }

  /** Return a token's name, as a server says it. @param {number} id */
  _name(id) {
    if (!this.model.vocabulary) return `${id} `;
    const bytes = this.model.vocabulary.decode([id]);
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    } catch {
      return `bytes:${Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("")}`;
    }
  }
}

/** Return the ids of the largest values, the largest first, and `own` among them. @param {ArrayLike<number>} row @param {number} most @param {number} own */
function bestOf(row, most, own) {
  const least = Float64Array.from(row).sort()[Math.max(0, row.length - most)];
  const ids = Array.from(row, (_, id) => id).filter((id) => row[id] >= least).sort((one, other) => row[other] - row[one] || one - other).slice(0, most);
  return ids.includes(own) ? ids : [...ids, own];
}
