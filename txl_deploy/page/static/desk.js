// @ts-check
/** The page's fields as values: the draft, which is the text to add, and the settings of a generation. */

import { byId, element } from "./dom.js";
import { counted, idsOf } from "./words.js";

/**
 * Copy a text to the clipboard.
 * @param {string} text
 * @returns {Promise<boolean>} false: the browser refused
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = /** @type {HTMLElement | null} */ (document.activeElement);
    const field = element("textarea", { class: "unseen", "aria-hidden": true });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy"); // navigator.clipboard is missing on pages without TLS from a remote host
    field.remove();
    before?.focus();
    return done;
  }
}

export class Desk {
  /**
   * @param {import("./server.js").Backend} server
   * @param {any} model as GET /v1/models lists it
   * @param {() => void} changed is called when the user changes the memory length
   */
  constructor(server, model, changed) {
    this._server = server;
    this._model = model;
    byId("count").max = model.limits.max_tokens;
    byId("top-k").max = model.vocab_size;
    byId("by-id").checked = !model.reads_text;
    byId("by-id-field").hidden = !model.reads_text;
    byId("memory-field").hidden = model.memory_length === null;
    const rows = model.memory_length ?? 0;
    const choices = [...new Set([rows, rows / 2, rows / 4, 0].map(Math.floor))];
    const named = (/** @type {number} */ count) => (count === 0 ? "none" : count === rows ? `all ${counted(rows, "row")}` : counted(count, "row"));
    byId("memory").replaceChildren(...choices.map((count) => element("option", { value: count }, named(count))));
    byId("memory").addEventListener("change", changed);
    byId("by-id").addEventListener("change", () => this.hint());
    byId("draft").addEventListener("input", () => this.hint());
    byId("draft").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
    byId("another").addEventListener("click", () => {
      byId("seed").value = crypto.getRandomValues(new Uint32Array(1))[0];
    });
    this.hint();
  }

  /** The draft as the user wrote it. */
  get written() {
    return byId("draft").value;
  }

  set written(text) {
    byId("draft").value = text;
    this.hint();
  }

  /** The most memory rows of the next generation; null if the model counts none. */
  get rows() {
    return this._model.memory_length === null ? null : Number(byId("memory").value);
  }

  clear() {
    this.written = "";
  }

  /** Return true if every field is valid; else the browser shows a message at the first that is not. */
  valid() {
    if (!byId("ask").checkValidity()) byId("settings").open = true; // the browser shows no message at a hidden field
    return byId("ask").reportValidity();
  }

  /** Read the settings of a generation. @returns {import("./story.js").Drawing & {count: number}} */
  settings() {
    const [k, p] = [Number(byId("top-k").value), Number(byId("top-p").value)];
    const rows = this.rows;
    return {
      count: Number(byId("count").value),
      temperature: Number(byId("temperature").value),
      ...(k > 0 ? { top_k: k } : {}),
      ...(p < 1 ? { top_p: p } : {}),
      seed: Number(byId("seed").value),
      ...(rows === null || rows === this._model.memory_length ? {} : { memory_length: rows }),
    };
  }

  /** Turn the draft into tokens; a text is tokenized by the server. @returns {Promise<import("./story.js").Draft>} */
  async draft() {
    const text = this.written;
    if (byId("by-id").checked) return { ids: idsOf(text, this._model.vocab_size), text: null };
    if (text === "") return { ids: [], text };
    const size = new Blob([JSON.stringify({ prompt: text })]).size;
    const most = this._model.limits.body_bytes;
    if (size > most) throw new Error(`The text takes ${counted(size, "byte")} as a request, the server takes at most ${most.toLocaleString("en")} at once.`);
    return { ids: await this._server.tokenize(text), text };
  }

  /** Show the draft's length, or how to write ids. */
  hint() {
    const ids = byId("by-id").checked;
    byId("draft-label").textContent = ids ? "Token ids to add" : "Text to add";
    const length = [...this.written].length;
    const how = ids ? "Whole numbers with spaces or commas between them." : `${counted(length, "character")}.`;
    byId("draft-hint").textContent = `${how} Ctrl and Enter generate.`;
  }
}
