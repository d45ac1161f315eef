// @ts-check
/** The model at a server: JSON, streamed completions, and the connection that keeps the page's sessions alive. */

/**
 * @typedef {Server | import("./local.js").Local} Backend where the model runs
 * @typedef {AsyncGenerator<{tokens: import("./story.js").Token[], seen?: number}, void, void>} Pieces of a completion
 */

const path = (/** @type {string} */ session) => `/v1/sessions/${encodeURIComponent(session)}`;

/** An error for a request that the server refused, with the server's reason. */
export class Refused extends Error {
  /** @param {number} status of the answer; 200 if the error came within a stream @param {string} message the server's own sentence @param {string} [code] */
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** An error for a server that cannot be reached, or that closed the connection within an answer. */
export class Lost extends Error {}

/** @param {unknown} error @param {string} said */
function asLost(error, said) {
  if (error instanceof DOMException && error.name === "AbortError") return error;
  return error instanceof Refused || error instanceof Lost ? error : new Lost(said);
}

/** @param {Response} answer */
async function refusal(answer) {
  let said = `the server answered ${answer.status}, and not why`;
  let code = "";
  try {
    const { error } = await answer.json();
    if (typeof error.message === "string") said = error.message;
    if (typeof error.code === "string") code = error.code;
  } catch {
    // the answer is not this server's JSON, e.g. a proxy's page
  }
  return new Refused(answer.status, said, code);
}

/** Yield the data of server-sent events. @param {Response} answer @returns {AsyncGenerator<string, void, void>} */
async function* eventsOf(answer) {
  if (answer.body === null) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop() ?? "";
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trim()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Return the tokens of a piece, with their alternatives, the most probable first.
 * @param {any} logprobs of a completion, with token ids; null gives []
 * @returns {import("./story.js").Token[]}
 */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  return logprobs.tokens.map((/** @type {string} */ name, /** @type {number} */ at) => {
    const ids = logprobs.top_token_ids[at] ?? {};
    const best = Object.entries(logprobs.top_logprobs[at] ?? {})
      .map(([other, logprob]) => ({ id: ids[other], name: other, logprob: Number(logprob) }))
      .sort((a, b) => b.logprob - a.logprob || a.id - b.id);
    return { id: logprobs.token_ids[at], name, logprob: logprobs.token_logprobs[at], best, drawn: false, by: null };
  });
}

/** Return all tokens of a completion. @param {Pieces} pieces */
export async function allOf(pieces) {
  const found = [];
  for await (const { tokens } of pieces) found.push(...tokens);
  return found;
}

export class Server {
  /**
   * @param {string} token "" if the server asks for none
   * @param {(method: string, path: string, body: unknown, hasToken: boolean) => void} asked is called before each request made for the user
   */
  constructor(token, asked) {
    this.token = token;
    this._asked = asked;
  }

  /**
   * Send a request; throw Refused or Lost unless the answer is a success.
   * @param {string} method
   * @param {string} path
   * @param {unknown} [body]
   * @param {AbortSignal} [signal]
   * @param {boolean} [quiet] true: do not call `asked`
   */
  async _fetch(method, path, body, signal, quiet = false) {
    if (!quiet) this._asked(method, path, body, this.token !== "");
    /** @type {Record<string, string>} */
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      const sent = body === undefined ? undefined : JSON.stringify(body);
      answer = await fetch(path, { method, headers, body: sent, signal, cache: "no-store", redirect: "error" });
    } catch (error) {
      throw asLost(error, "The server cannot be reached.");
    }
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }

  /**
   * Send a request and parse its answer as JSON.
   * @param {string} method
   * @param {string} path
   * @param {unknown} [body]
   * @param {boolean} [quiet] true: do not call `asked`
   * @returns {Promise<any>}
   */
  async _ask(method, path, body, quiet = false) {
    const answer = await this._fetch(method, path, body, undefined, quiet);
    try {
      return await answer.json();
    } catch (error) {
      throw asLost(error, "The server went away in the middle of an answer.");
    }
  }

  /** Describe the model. @param {boolean} [quiet] */
  async about(quiet) {
    return (await this._ask("GET", "/v1/models", undefined, quiet)).data[0];
  }

  /** @param {string} text @returns {Promise<number[]>} */
  async tokenize(text) {
    return (await this._ask("POST", "/tokenize", { prompt: text }, true)).tokens;
  }

  /** @param {number[]} tokens @returns {Promise<string>} */
  async textOf(tokens) {
    return (await this._ask("POST", "/detokenize", { tokens }, true)).prompt;
  }

  /** Let a session, new or not, go on from where a different one is. @param {string} from @param {string} to */
  async copy(from, to) {
    await this._ask("POST", `${path(from)}/copy`, { to });
  }

  /** End a session, which may have ended. @param {string} session */
  async end(session) {
    try {
      await this._ask("DELETE", path(session), undefined, true);
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) throw error;
    }
  }

  /** @param {string} session @returns {Promise<{seen: number, fill: number | null}>} */
  async info(session) {
    return await this._ask("GET", path(session), undefined, true);
  }

  /** Cancel what a session does: its request then ends as refused, with the code "cancelled". @param {string} session */
  async cancel(session) {
    await this._ask("POST", `${path(session)}/cancel`);
  }

  /**
   * Ask what the datastore has to say about the token behind a text. The server answers one request at a time: where it
   * refuses with 429 it is asked once again, a second later.
   * @param {number[]} prompt
   * @returns {Promise<import("./neighbours.js").Answer | null>} null: this server shows none
   */
  async neighbours(prompt) {
    for (let again = false; ; again = true) {
      try {
        return await this._ask("POST", "/v1/neighbours", { prompt, alternatives: 10, neighbours: 8 }, again);
      } catch (error) {
        const status = error instanceof Refused ? error.status : 0;
        if (status === 404) return null;
        if (status !== 429 || again) throw error;
        await new Promise((done) => setTimeout(done, 1000));
      }
    }
  }

  /**
   * Yield the tokens of a completion as they come.
   * @param {Record<string, unknown>} body
   * @param {AbortSignal} [signal]
   * @param {boolean} [quiet] true: do not call `asked`
   * @returns {Pieces}
   */
  async *complete(body, signal, quiet) {
    const answer = await this._fetch("POST", "/v1/completions", { ...body, return_token_ids: true, stream: true }, signal, quiet);
    try {
      for await (const data of eventsOf(answer)) {
        if (data === "[DONE]") return;
        const piece = JSON.parse(data);
        if (piece.error) throw new Refused(200, String(piece.error.message), String(piece.error.code ?? ""));
        yield { tokens: tokensOf(piece.choices[0].logprobs), seen: piece.session?.seen };
      }
    } catch (error) {
      throw asLost(error, "The server went away in the middle of an answer.");
    }
    throw new Lost("The server went away in the middle of an answer.");
  }

  /**
   * Open this page's place at the server. Sessions whose names begin with its `tab` end with this connection.
   * @param {() => void} ended is called once, when the connection ends
   * @returns {Promise<{tab: string, sessions?: number}>}
   */
  async open(ended) {
    const answer = await this._fetch("GET", "/playground/tab", undefined, undefined, true);
    const events = eventsOf(answer);
    const first = await events.next().catch((error) => {
      throw asLost(error, "The server went away.");
    });
    if (first.done) throw new Lost("The server went away.");
    const found = JSON.parse(first.value);
    (async () => {
      try {
        for await (const _beat of events);
      } catch {
        // an error ends the connection, too
      }
      ended();
    })();
    return found;
  }
}
