// @ts-check
/** The text as tokens, coloured by probability; the user chooses one by keyboard or pointer. */

import { byId, element } from "./dom.js";
import { percent, quoted, running, shade } from "./words.js";

/** @typedef {import("./story.js").Token} Token */

const SHOWN = 4000; // most tokens on the page, the last ones of the text
const LEAP = 10; // tokens by which Page Up and Page Down move

/** Describe a token in words, e.g. “the”, 12 %, token 3. @param {Token} token @param {number} index in the text */
export function described(token, index) {
  const name = quoted(token.name);
  return `${name}, ${token.logprob === null ? "no probability" : percent(Math.exp(token.logprob))}, token ${index + 1}`;
}

export class Tokens {
  /** @param {(index: number | null, entered: boolean) => void} chosen is called for a chosen token; entered: by a key */
  constructor(chosen) {
    this._box = byId("text");
    this._chosen = chosen;
    /** @type {Token[]} */ this._shown = [];
    /** @type {HTMLElement[]} */ this._spans = [];
    this._first = 0; // index of the first token that is shown
    this._held = [0, 0]; // tokens marked as in the memory: [first, end)
    /** @type {number | null} */ this.selected = null;
    this._box.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this._key(event));
    this._box.addEventListener("click", (/** @type {Event} */ event) => this._click(event));
    for (const name of ["focusin", "pointerover"]) {
      this._box.addEventListener(name, (/** @type {Event} */ event) => this._tell(event));
    }
  }

  /**
   * Show a text. Elements of tokens that are shown already are reused.
   * @param {Token[]} tokens
   * @param {[number, number]} held the tokens in the memory, [first, end)
   * @param {boolean} follow true: scroll to the end
   */
  show(tokens, held, follow) {
    const first = Math.max(0, tokens.length - SHOWN);
    while (this._first < first && this._shown.length) this._drop(0);
    if (!this._shown.length || first < this._first) {
      while (this._shown.length) this._drop(this._shown.length - 1);
      this._first = first;
    }
    let same = 0;
    while (same < this._shown.length && this._shown[same] === tokens[first + same]) same += 1;
    while (this._shown.length > same) this._drop(this._shown.length - 1);
    const news = [];
    for (let index = first + same; index < tokens.length; index += 1) news.push(this._add(tokens[index], index));
    this._box.append(...news);
    this._mark(held);
    if (this.selected !== null && !this._span(this.selected)) this.select(null);
    const stop = this._box.querySelector('[tabindex="0"]');
    if (!stop && this._spans.length) this._spans[this._spans.length - 1].tabIndex = 0;
    this._box.hidden = !tokens.length;
    byId("empty").hidden = tokens.length > 0;
    document.body.classList.toggle("blank", !tokens.length);
    byId("earlier").hidden = first === 0;
    byId("earlier").textContent = `The first ${first.toLocaleString("en")} tokens are not shown; “Copy text” has them too.`;
    if (!tokens.length) byId("readout").textContent = "";
    if (follow) this._box.scrollTop = this._box.scrollHeight;
  }

  /** Select a token. @param {number | null} index null: none */
  select(index) {
    if (this.selected !== null) this._span(this.selected)?.setAttribute("aria-selected", "false");
    this.selected = index;
    if (index !== null) this._span(index)?.setAttribute("aria-selected", "true");
  }

  /** Focus a token, or the nearest that is shown. @param {number} index @param {boolean} [still] true: do not scroll */
  focus(index, still = false) {
    const span = this._span(Math.min(this._first + this._spans.length - 1, Math.max(this._first, index)));
    if (!span) return;
    const stop = this._box.querySelector('[tabindex="0"]');
    if (stop) stop.tabIndex = -1;
    span.tabIndex = 0;
    span.focus({ preventScroll: still });
  }

  /** @param {number} index @returns {HTMLElement | undefined} */
  _span(index) {
    return this._spans[index - this._first];
  }

  /** @param {Token} token @param {number} index */
  _add(token, index) {
    const text = running(token.name);
    const kind = `token ${shade(token.logprob)} ${token.drawn ? "" : "typed"} ${text.endsWith("\n") ? "ends" : ""}`;
    const name = described(token, index);
    const span = element("span", { class: kind, role: "option", "aria-selected": "false", "aria-label": name, tabindex: -1 });
    span.textContent = text;
    span.dataset.percent = token.logprob === null ? "" : percent(Math.exp(token.logprob)).replace("below ", "<").replace("above ", ">");
    this._shown.push(token);
    this._spans.push(span);
    return span;
  }

  /** @param {number} at */
  _drop(at) {
    const [gone] = this._spans.splice(at, 1);
    this._shown.splice(at, 1);
    if (at === 0) this._first += 1;
    gone.remove();
  }

  /** Mark the tokens in the memory and unmark those that left it. @param {[number, number]} held */
  _mark([from, to]) {
    const [before, until] = this._held;
    for (let index = before; index < until; index += 1) {
      if (index < from || index >= to) this._span(index)?.classList.remove("held");
    }
    for (let index = Math.max(from, this._first); index < to; index += 1) {
      this._span(index)?.classList.add("held");
    }
    this._held = [from, to];
  }

  /** @param {Event} event @returns {number | null} */
  _indexOf(event) {
    const span = /** @type {HTMLElement} */ (event.target).closest?.('[role="option"]');
    return span ? this._first + this._spans.indexOf(/** @type {HTMLElement} */ (span)) : null;
  }

  /** @param {Event} event */
  _tell(event) {
    const index = this._indexOf(event);
    if (index !== null) byId("readout").textContent = described(this._shown[index - this._first], index);
  }

  /** @param {Event} event */
  _click(event) {
    const index = this._indexOf(event);
    if (index === null || String(window.getSelection()).length) return; // the user is selecting text to copy
    this.focus(index);
    this._chosen(index, false);
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const index = this._indexOf(event);
    if (index === null || event.ctrlKey || event.altKey || event.metaKey) return;
    const last = this._first + this._spans.length - 1;
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: this._first, End: last, PageDown: index + LEAP, PageUp: index - LEAP };
    if (event.key === "ArrowDown" || event.key === "ArrowUp") this.focus(this._nearest(index, event.key === "ArrowDown" ? 1 : -1));
    else if (event.key in moves) this.focus(moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this._chosen(index, true);
    else return;
    event.preventDefault();
  }

  /** Find the token below (way 1) or above (-1) a token. @param {number} index @param {1 | -1} way */
  _nearest(index, way) {
    const here = this._spans[index - this._first].getClientRects()[0];
    let [best, distance, line] = [index, Infinity, here.top];
    for (let at = index + way; this._span(at); at += way) {
      const place = this._spans[at - this._first].getClientRects()[0];
      if (!place || Math.abs(place.top - here.top) < here.height / 2) continue;
      if (line === here.top) line = place.top;
      if (Math.abs(place.top - line) > here.height / 2) break;
      const away = Math.abs(place.left - here.left);
      if (away < distance) [best, distance] = [at, away];
    }
    return best;
  }
}
