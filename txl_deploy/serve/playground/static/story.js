// @ts-check
/**
 * The text of the page and the session that remembers it: what was given and generated, going back, and states.
 *
 * The session at the server has been given every token but the last ones, of which there are `lead`: those were read for
 * a look alone, or appended by hand, and go in with the next generation. Lists of tokens are never changed in place once
 * a state holds them.
 */

import { bodyOf, checkSize, tokensOf } from "./asking.js";
import { Refused } from "./server.js";
import { counted } from "./words.js";

/**
 * @typedef {{id: number, name: string, logprob: number}} Choice a token that could stand somewhere
 * @typedef {{id: number, name: string, logprob: number | null, best: Choice[], drawn: boolean, by: Action | null}} Token
 *     `best` are the most probable tokens at its place, the best first
 * @typedef {{temperature: number, top_k?: number, top_p?: number, seed: number, memory_length?: number}} Drawing
 * @typedef {{before: State, prompt: number[], drawing: Drawing}} Action a generation, which can be repeated
 * @typedef {{number: number, session: string | null, seen: number, fill: number | null, tokens: Token[], lead: number,
 *     draft: string, kept: boolean, name: string, then: string}} State `session` is the copy that remembers it, null for nothing
 * @typedef {{ids: number[], text: string | null}} Draft what is to be added; a text is sent as one where it can be
 */

const OWN = 3; // sessions beside states: the text's, the one of a look, one to spare
const MOST = 24; // states that are kept, where the server has room for more

export class Story {
  /**
   * @param {import("./server.js").Server} server
   * @param {any} model as GET /v1/models lists it
   * @param {() => void} changed is called whenever something is worth showing again
   */
  constructor(server, model, changed) {
    this.server = server;
    this.limits = model.limits;
    /** @type {number | null} memory rows that there can be */ this.rows = model.memory_length;
    this._changed = changed;
    /** @type {Token[]} */ this.tokens = [];
    /** @type {State[]} */ this.states = [];
    /** @type {Choice[]} what may come next, where that was looked at */ this.next = [];
    /** @type {number | null} memory rows that are filled, null where none are counted */ this.fill = null;
    this.fed = 0; // tokens that were fed when the memory was as full as that
    /** @type {number | null} of the text's own session */ this._fill = null;
    this.lead = 0;
    this.seen = 0;
    this.there = false; // whether the session exists
    this._looks = false; // whether a look runs
    this._tab = "";
    this._numbers = 0;
    this._most = MOST;
  }

  /**
   * Begin in a new place at the server. A text that is there is given anew with the next generation, and so is `tokens`,
   * the text of a page that was loaded again.
   * @param {{tab: string, sessions?: number}} place
   * @param {Token[]} [tokens]
   */
  enter(place, tokens = this.tokens) {
    this.tokens = tokens;
    this._tab = place.tab;
    this._most = Math.max(1, Math.min(MOST, (place.sessions ?? MOST + OWN) - OWN));
    this.forget();
  }

  /** Know of no session any more: neither of the text's nor of states'. */
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

  /** Note how full the memory of the text's session is. @param {number | null} fill */
  _stands(fill) {
    [this._fill, this.fill, this.fed] = [fill, fill, this.seen];
  }

  get _session() {
    return `${this._tab}-text`;
  }

  get _look() {
    return `${this._tab}-look`;
  }

  /** Whether the text stands where a state was kept. @param {State} state */
  at(state) {
    return state.tokens === this.tokens && state.lead === this.lead && state.seen === this.seen;
  }

  // --- states -------------------------------------------------------------------------------------------------------

  /**
   * Keep the state as it is, once.
   * @param {string} draft what is to be added next, as it was written
   * @param {boolean} kept whether somebody asked for it; others go first where there is no room
   * @param {string} [name] that somebody gives it
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
      await this._room(() => this._copy(this._session, String(session)));
    }
    const { seen, tokens, lead } = this;
    const state = { number, session, seen, fill: this._fill, tokens, lead, draft, kept, name, then: "" };
    this.states.push(state);
    while (this.states.length > this._most) await this._drop();
    this._changed();
    return state;
  }

  /** Make a copy; where the server has no room for it, a state goes and it is tried again. @param {() => Promise<void>} copy */
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

  /** Give up a state: the oldest that nobody asked for, or else the oldest. @param {State} [gone] */
  async _drop(gone = this.states.find((state) => !state.kept) ?? this.states[0]) {
    this.states = this.states.filter((state) => state !== gone);
    if (gone.session) await this._end(gone.session);
  }

  /** Stand where a state was kept. @param {State} state */
  async back(state) {
    if (state.session) await this._resumed(state, state.session);
    else if (this.there) await this._end(this._session);
    this.there = state.session !== null;
    ({ seen: this.seen, tokens: this.tokens, lead: this.lead } = state);
    this._stands(state.fill);
    this.next = [];
    this._changed();
  }

  /** Make a state the text's session. @param {State} state @param {string} session */
  async _resumed(state, session) {
    try {
      await this._room(() => this._copy(session, this._session));
    } catch (error) {
      if (!(error instanceof Refused && error.code === "session_not_found")) throw error;
      this.states = this.states.filter((other) => other !== state);
      this._changed();
      throw new Refused(410, `State ${state.number} is gone: the server no longer has it. Go back to another one, or go on from here.`);
    }
  }

  /** @param {string} from @param {string} to */
  async _copy(from, to) {
    await this.server.ask("POST", `/v1/sessions/${encodeURIComponent(from)}/copy`, { to });
  }

  /** @param {string} session */
  async _end(session) {
    try {
      await this.server.ask("DELETE", `/v1/sessions/${encodeURIComponent(session)}`, undefined, { quiet: true });
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) throw error; // it is gone already
    }
  }

  /** @param {string} session */
  async _info(session) {
    return await this.server.ask("GET", `/v1/sessions/${encodeURIComponent(session)}`, undefined, { quiet: true });
  }

  /** Forget the text and its session; states stay. */
  async clear() {
    if (this.there) await this._end(this._session);
    this.tokens = [];
    this.next = [];
    this._unfed();
    this._changed();
  }

  // --- generating and looking ---------------------------------------------------------------------------------------

  /** The tokens that go in before the draft. */
  _before() {
    return this.lead ? this.tokens.slice(-this.lead).map((token) => token.id) : [];
  }

  /**
   * Give the draft to the model and let it generate.
   * @param {Draft} draft
   * @param {Drawing} drawing
   * @param {number} count tokens to generate
   * @param {string} written the draft as it was written
   * @returns {Promise<number | null>} tokens that were generated; null where it was stopped before the first, and nothing changed
   */
  async generate(draft, drawing, count, written) {
    checkSize(this.limits, this._before(), draft, count);
    const number = this._numbers;
    const before = await this.keep(written, false);
    const made = before.number > number; // for this generation alone
    const body = { ...bodyOf(this.limits, this._before(), draft, drawing, count), session: this._session, session_seen: this.seen };
    const known = this.lead;
    const given = known + draft.ids.length || (this.there ? 0 : 1); // nothing at all begins with the boundary token
    const action = { before, prompt: /** @type {number[]} */ ([]), drawing };
    const start = this.tokens.length - known;
    this.tokens = [...this.tokens.slice(0, start), ...this.tokens.slice(start).map((token) => ({ ...token, by: action }))];
    this.next = [];
    let read = 0;
    try {
      for await (const piece of this.server.complete(body)) {
        for (const token of tokensOf(piece.choices[0].logprobs)) {
          if (read < given) action.prompt.push(token.id);
          if (read >= known) this.tokens.push({ ...token, by: action, drawn: read >= given });
          read += 1;
        }
        if (piece.session) this.seen = piece.session.seen;
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
      this.there = true; // the session has begun
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

  /** How full the memory is while tokens come; the server says it exactly at the end. @param {State} before @param {number} read @param {Drawing} drawing */
  _filled(before, read, drawing) {
    if (this.rows === null) return;
    this.fill = Math.min(drawing.memory_length ?? this.rows, (before.fill ?? 0) + read);
    this.fed = Math.max(0, this.tokens.length - 1);
  }

  /** See how the session stands after a generation. Where it is gone the text stays, and is given anew with the next one. */
  async _settle() {
    try {
      const info = await this._info(this._session);
      if (info.seen !== this.tokens.length - 1) throw new Refused(409, "the session stands elsewhere");
      [this.there, this.lead, this.seen] = [true, 0, info.seen];
      this._stands(info.fill ?? null);
      this._changed();
    } catch (error) {
      if (!(error instanceof Refused)) return this.forget();
      await this.leave();
    }
  }

  /** Give the text's session up, because it stands elsewhere; the text is given anew with the next generation. */
  async leave() {
    await this._end(this._session);
    this._unfed();
    this._changed();
  }

  /**
   * Stand where a generation that failed began, if that is possible.
   * @param {State} before
   * @param {unknown} error
   * @param {boolean} made whether that state was kept for this generation alone
   */
  async _restored(before, error, made) {
    if (error instanceof Refused && error.status >= 400 && error.status < 500) { // it was not begun at all
      ({ tokens: this.tokens, lead: this.lead } = before);
      if (made) await this._drop(before);
      this._changed();
      return;
    }
    try {
      this.there = true; // it may have begun
      await this.back(before);
    } catch {
      this.tokens = before.tokens;
      this.forget();
    }
  }

  /** End what runs: a generation with what was generated so far, a look with nothing. */
  async stop() {
    await this.server.ask("POST", `/v1/sessions/${encodeURIComponent(this._looks ? this._look : this._session)}/cancel`);
  }

  /**
   * Read the draft on a copy of the session: how probable its tokens are, and what may come next. The memory of the text
   * itself is given the draft with the next generation.
   * @param {Draft} draft
   * @param {Drawing} drawing its memory length counts
   */
  async look(draft, drawing) {
    checkSize(this.limits, this._before(), draft, 1);
    const session = this._look;
    const known = this.lead;
    const given = known + draft.ids.length || (this.there ? 0 : 1);
    if (this.there) await this._room(() => this._copy(this._session, session));
    const { seed, memory_length } = drawing;
    const how = { temperature: 0, seed, ...(memory_length === undefined ? {} : { memory_length }) };
    const body = { ...bodyOf(this.limits, this._before(), draft, how, 1), session, session_seen: this.seen };
    /** @type {Token[]} */ const found = [];
    this._looks = true;
    try {
      for await (const piece of this.server.complete(body)) {
        found.push(...tokensOf(piece.choices[0].logprobs));
      }
    } finally {
      this._looks = false;
      await this._end(session);
    }
    const start = this.tokens.length - known;
    const first = found.slice(0, known).map((token, at) => (token.logprob === null ? this.tokens[start + at] : token));
    this.tokens = [...this.tokens.slice(0, start), ...first, ...found.slice(known, given)];
    this.lead = this.tokens.length - start;
    this.next = found[given]?.best ?? [];
    this._changed();
    return given - known;
  }

  /** Append a token by hand. @param {Choice} choice @param {Choice[]} best the tokens it was chosen from */
  append(choice, best) {
    this.tokens = [...this.tokens, { ...choice, best, drawn: false, by: null }];
    this.lead += 1;
    this.next = [];
    this._stands(this._fill);
    this._changed();
  }

  // --- going back inside the text -----------------------------------------------------------------------------------

  /**
   * Stand before a token. Its generation is repeated from the state before it, up to there, so that the memory is exactly
   * what it was; where that state is gone, the text is read anew with the next generation.
   * @param {number} index of the token
   * @returns {Promise<boolean>} whether the memory is exactly what it was
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
      const asked = { prompt: action.prompt, max_tokens: more, ...action.drawing, logprobs: 0, return_token_ids: true };
      const answer = await this.server.ask("POST", "/v1/completions", { ...asked, session: this._session, session_seen: this.seen });
      const again = answer.choices[0].logprobs.token_ids;
      const info = await this._info(this._session);
      [this.there, this.seen, this.tokens, this.lead] = [true, info.seen, tokens, 0];
      this._stands(info.fill ?? null);
      if (tokens.slice(-more).some((token, at) => token.id !== again[at])) {
        await this.back(action.before); // the backend does not repeat itself to the bit: its own tokens are given to it
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
