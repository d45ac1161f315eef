// @ts-check
/**
 * The page's text, the server's session that remembers it, and the states to which the user can go back.
 *
 * The session was given all tokens but the last `lead`, e.g. 3 of 10 that were only looked at or appended by hand: the
 * next generation feeds them first. A list of tokens never changes in place once a state holds it.
 */

import { bodyOf, checkSize } from "./asking.js";
import { Refused, allOf } from "./server.js";
import { counted } from "./words.js";

/**
 * @typedef {{id: number, name: string, logprob: number, mixed?: number}} Choice a token that could stand at some place;
 *     `mixed` is its probability with a datastore
 * @typedef {{id: number, name: string, logprob: number | null, best: Choice[], drawn: boolean, by: Action | null}} Token
 *     `best` are the most probable tokens at its place, the best first
 * @typedef {{temperature: number, top_k?: number, top_p?: number, seed: number, memory_length?: number}} Drawing
 * @typedef {{before: State, prompt: number[], drawing: Drawing}} Action a generation, which can be repeated
 * @typedef {{number: number, session: string | null, seen: number, fill: number | null, tokens: Token[], lead: number,
 *     draft: string, kept: boolean, name: string, then: string}} State `session` is its copy at the server, null at the beginning
 * @typedef {{ids: number[], text: string | null}} Draft tokens to add; `text` is sent instead of ids if no token goes before it
 */

const OWN = 3; // sessions in addition to states: the text's, a look's, and one to spare
const MOST = 24; // most states that are kept; fewer if the server has less room

export class Story {
  /**
   * @param {import("./server.js").Backend} server
   * @param {any} model as GET /v1/models lists it
   * @param {() => void} changed is called after each change that the page shows
   */
  constructor(server, model, changed) {
    this.server = server;
    this.limits = model.limits;
    /** @type {number | null} M, or null if no rows are counted */ this.rows = model.memory_length;
    this._changed = changed;
    /** @type {Token[]} */ this.tokens = [];
    /** @type {State[]} */ this.states = [];
    /** @type {Choice[]} alternatives for the next token, after a look */ this.next = [];
    /** @type {number | null} filled memory rows, null if none are counted */ this.fill = null;
    this.fed = 0; // tokens fed when `fill` was noted
    /** @type {number | null} `fill` of the text's own session */ this._fill = null;
    this.lead = 0;
    this.seen = 0;
    this.there = false; // true: the session exists
    this._looks = false; // true: a look runs
    this._tab = "";
    this._numbers = 0;
    this._most = MOST;
  }

  /**
   * Begin in a new place at the server, which has no session yet: the next generation feeds the whole text.
   * @param {{tab: string, sessions?: number}} place
   * @param {Token[]} [tokens] the text; after a reload the stored one
   */
  enter(place, tokens = this.tokens) {
    this.tokens = tokens;
    this._tab = place.tab;
    this._most = Math.max(1, Math.min(MOST, (place.sessions ?? MOST + OWN) - OWN));
    this.forget();
  }

  /** Forget all sessions, the text's and those of states; the text stays. */
  forget() {
    this.tokens = this.tokens.map((token) => ({ ...token, by: null }));
    this.states = [];
    this._unfed();
    this._changed();
  }

  _unfed() {
    [this.there, this.seen, this.lead] = [false, 0, this.tokens.length];
    this._stands(this.rows === null ? null : 0);
  }

  /** Note the filled memory rows of the text's session. @param {number | null} fill */
  _stands(fill) {
    [this._fill, this.fill, this.fed] = [fill, fill, this.seen];
  }

  get _session() {
    return `${this._tab}-text`;
  }

  get _look() {
    return `${this._tab}-look`;
  }

  /** Return true if the text has not changed since a state was kept. @param {State} state */
  at(state) {
    return state.tokens === this.tokens && state.lead === this.lead && state.seen === this.seen;
  }

  // --- states -------------------------------------------------------------------------------------------------------

  /**
   * Keep the present state, or return the one that was kept of it before.
   * @param {string} draft the draft as the user wrote it
   * @param {boolean} kept true: the user asked for it; states that nobody asked for are dropped first
   * @param {string} [name] by the user
   */
  async keep(draft, kept, name = "") {
    const same = this.states.find((state) => this.at(state) && state.draft === draft);
    if (same) {
      same.kept ||= kept;
      same.name = name || same.name;
      this._changed();
      return same;
    }
    const number = ++this._numbers;
    /** @type {string | null} */ let session = null;
    if (this.there) {
      session = `${this._tab}-state-${number}`;
      await this._room(() => this.server.copy(this._session, String(session)));
    }
    const { seen, tokens, lead } = this;
    const state = { number, session, seen, fill: this._fill, tokens, lead, draft, kept, name, then: "" };
    this.states.push(state);
    while (this.states.length > this._most) await this._drop();
    this._changed();
    return state;
  }

  /** Copy a session; while the server answers 429, drop a state and try again. @param {() => Promise<void>} copy */
  async _room(copy) {
    for (;;) {
      try {
        return await copy();
      } catch (error) {
        if (!(error instanceof Refused && error.status === 429 && this.states.length)) throw error;
        await this._drop();
      }
    }
  }

  /** Drop a state: by default the oldest that nobody asked for, or, if the user asked for all, the oldest. @param {State} [gone] */
  async _drop(gone = this.states.find((state) => !state.kept) ?? this.states[0]) {
    this.states = this.states.filter((state) => state !== gone);
    if (gone.session) await this.server.end(gone.session);
  }

  /** Go back to a state. @param {State} state */
  async back(state) {
    if (state.session) await this._resumed(state, state.session);
    else if (this.there) await this.server.end(this._session);
    this.there = state.session !== null;
    ({ seen: this.seen, tokens: this.tokens, lead: this.lead } = state);
    this._stands(state.fill);
    this.next = [];
    this._changed();
  }

  /** Copy a state's session to the text's; if the server lost it, drop the state and throw. @param {State} state @param {string} session */
  async _resumed(state, session) {
    try {
      await this._room(() => this.server.copy(session, this._session));
    } catch (error) {
      if (!(error instanceof Refused && error.code === "session_not_found")) throw error;
      this.states = this.states.filter((other) => other !== state);
      this._changed();
      throw new Refused(410, `State ${state.number} is gone: the server no longer has it. Go back to another one, or go on from here.`);
    }
  }

  /** Forget the text and its session; states stay. */
  async clear() {
    if (this.there) await this.server.end(this._session);
    this.tokens = [];
    this.next = [];
    this._unfed();
    this._changed();
  }

  // --- generating and looking ---------------------------------------------------------------------------------------

  /** Return the ids that are fed before the draft, the last `lead` of the text. */
  _before() {
    return this.lead ? this.tokens.slice(-this.lead).map((token) => token.id) : [];
  }

  /**
   * Feed the draft to the model and generate.
   * @param {Draft} draft
   * @param {Drawing} drawing
   * @param {number} count tokens to generate
   * @param {string} written the draft as the user wrote it
   * @returns {Promise<number | null>} number of generated tokens; null: stopped before the first, and nothing changed
   */
  async generate(draft, drawing, count, written) {
    checkSize(this.limits, this._before(), draft, count);
    const number = this._numbers;
    const before = await this.keep(written, false);
    const made = before.number > number; // true: the state was kept only for this generation
    const body = { ...bodyOf(this.limits, this._before(), draft, drawing, count), session: this._session, session_seen: this.seen };
    const known = this.lead;
    const given = known + draft.ids.length || (this.there ? 0 : 1); // an empty text begins with the boundary token
    const action = { before, prompt: /** @type {number[]} */ ([]), drawing };
    const start = this.tokens.length - known;
    this.tokens = [...this.tokens.slice(0, start), ...this.tokens.slice(start).map((token) => ({ ...token, by: action }))];
    this.next = [];
    let read = 0;
    try {
      for await (const piece of this.server.complete(body)) {
        for (const token of piece.tokens) {
          if (read < given) action.prompt.push(token.id);
          if (read >= known) this.tokens.push({ ...token, by: action, drawn: read >= given });
          read += 1;
        }
        this.seen = piece.seen ?? this.seen;
        this.lead = Math.max(0, known - read);
        this._filled(before, read, drawing);
        this._changed();
      }
    } catch (error) {
      if (!(error instanceof Refused && error.code === "cancelled")) {
        if (read > given) await this._settle();
        else await this._restored(before, error, made);
        throw error;
      }
    }
    const generated = Math.max(0, read - given);
    if (generated === 0) {
      this.there = true; // the request has begun the session
      await this.back(before);
      if (made) await this._drop(before);
      this._changed();
      return null;
    }
    await this._settle();
    before.then = `${counted(generated, "token")} with seed ${drawing.seed}`;
    this._changed();
    return generated;
  }

  /** Estimate the filled rows while tokens come; _settle asks the server at the end. @param {State} before @param {number} read @param {Drawing} drawing */
  _filled(before, read, drawing) {
    if (this.rows === null) return;
    this.fill = Math.min(drawing.memory_length ?? this.rows, (before.fill ?? 0) + read);
    this.fed = Math.max(0, this.tokens.length - 1);
  }

  /** Ask the server for the session's position after a generation. If it is gone, the text stays and is fed with the next one. */
  async _settle() {
    try {
      const info = await this.server.info(this._session);
      if (info.seen !== this.tokens.length - 1) throw new Refused(409, "the session stands elsewhere");
      [this.there, this.lead, this.seen] = [true, 0, info.seen];
      this._stands(info.fill ?? null);
      this._changed();
    } catch (error) {
      if (!(error instanceof Refused)) return this.forget();
      await this.leave();
    }
  }

  /** End the text's session, which is gone or was moved on by a different client; the next generation feeds the whole text. */
  async leave() {
    await this.server.end(this._session);
    this._unfed();
    this._changed();
  }

  /**
   * Go back to the beginning of a generation that failed; if its state is lost, keep the text and forget all sessions.
   * @param {State} before
   * @param {unknown} error
   * @param {boolean} made true: that state was kept only for this generation
   */
  async _restored(before, error, made) {
    if (error instanceof Refused && error.status >= 400 && error.status < 500) { // the server refused the request, so the session is unchanged
      ({ tokens: this.tokens, lead: this.lead } = before);
      if (made) await this._drop(before);
      this._changed();
      return;
    }
    try {
      this.there = true; // the session may have begun
      await this.back(before);
    } catch {
      this.tokens = before.tokens;
      this.forget();
    }
  }

  /** Cancel what runs: a generation keeps the tokens so far, a look none. */
  async stop() {
    await this.server.cancel(this._looks ? this._look : this._session);
  }

  /**
   * Feed the draft to a copy of the session, for the probabilities of its tokens and the alternatives for the next one. The
   * text's own session is fed the draft with the next generation.
   * @param {Draft} draft
   * @param {Drawing} drawing only its seed and memory length are used
   */
  async look(draft, drawing) {
    checkSize(this.limits, this._before(), draft, 1);
    const session = this._look;
    const known = this.lead;
    const given = known + draft.ids.length || (this.there ? 0 : 1);
    if (this.there) await this._room(() => this.server.copy(this._session, session));
    const { seed, memory_length } = drawing;
    const how = { temperature: 0, seed, ...(memory_length === undefined ? {} : { memory_length }) };
    const body = { ...bodyOf(this.limits, this._before(), draft, how, 1), session, session_seen: this.seen };
    /** @type {Token[]} */ let found;
    this._looks = true;
    try {
      found = await allOf(this.server.complete(body));
    } finally {
      this._looks = false;
      await this.server.end(session);
    }
    const start = this.tokens.length - known;
    const first = found.slice(0, known).map((token, at) => (token.logprob === null ? this.tokens[start + at] : token));
    this.tokens = [...this.tokens.slice(0, start), ...first, ...found.slice(known, given)];
    this.lead = this.tokens.length - start;
    this.next = found[given]?.best ?? [];
    this._changed();
    return given - known;
  }

  /** Append a token by hand. @param {Choice} choice @param {Choice[]} best the alternatives that it was chosen from */
  append(choice, best) {
    this.tokens = [...this.tokens, { ...choice, best, drawn: false, by: null }];
    this.lead += 1;
    this.next = [];
    this._stands(this._fill);
    this._changed();
  }

  // --- going back inside the text -----------------------------------------------------------------------------------

  /**
   * Cut the text before a token. Its generation is repeated from the state before it up to the token, so that the memory is
   * exactly what it was. If that state is gone, the next generation feeds the whole text.
   * @param {number} index of the token
   * @returns {Promise<boolean>} true: the memory is exactly what it was
   */
  async rewind(index) {
    const tokens = this.tokens.slice(0, index);
    const fed = this.tokens.length - this.lead;
    const action = this.tokens[index]?.by;
    this.next = [];
    if (index >= fed) {
      [this.tokens, this.lead] = [tokens, index - fed];
      this._stands(this._fill);
      this._changed();
      return true;
    }
    if (index === 0) {
      await this.clear();
      return true;
    }
    if (!action || !this.states.includes(action.before)) {
      await this.clear();
      this.tokens = tokens;
      this._unfed();
      this._changed();
      return false;
    }
    await this.back(action.before);
    const start = this.tokens.length - this.lead;
    const more = index - start - action.prompt.length; // tokens to generate again
    if (more > 0) {
      const asked = { prompt: action.prompt, max_tokens: more, ...action.drawing, logprobs: 0 };
      const again = await allOf(this.server.complete({ ...asked, session: this._session, session_seen: this.seen }));
      const info = await this.server.info(this._session);
      [this.there, this.seen, this.tokens, this.lead] = [true, info.seen, tokens, 0];
      this._stands(info.fill ?? null);
      if (tokens.slice(-more).some((token, at) => token.id !== again[at].id)) {
        await this.back(action.before); // the backend drew different tokens this time: feed it the text's instead
        [this.tokens, this.lead] = [tokens, index - start];
        this._changed();
        return false;
      }
    } else {
      [this.tokens, this.lead] = [tokens, index - start];
    }
    this._changed();
    return true;
  }
}
