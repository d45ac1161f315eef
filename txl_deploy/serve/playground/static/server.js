// @ts-check
/** What the page asks of its server: JSON, streamed completions, and the connection that the page's sessions live by. */

/** The server has refused something, and says why. */
export class Refused extends Error {
  /**
   * @param {number} status of the answer; 200 where it came inside of one
   * @param {string} message the server's own sentence
   * @param {string} [code]
   */
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server cannot be reached, or went away in the middle. */
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
    // it is no answer of this server's: a proxy's perhaps
  }
  return new Refused(answer.status, said, code);
}

/**
 * The data of server-sent events, one after the other.
 * @param {Response} answer
 * @returns {AsyncGenerator<string, void, void>}
 */
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

export class Server {
  /**
   * @param {string} token "" where the server asks for none
   * @param {(method: string, path: string, body: unknown) => void} asked is told what is asked for a user
   */
  constructor(token, asked) {
    this.token = token;
    this._asked = asked;
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {unknown} [body]
   * @param {AbortSignal} [signal]
   * @param {boolean} [quiet] whether nobody is told
   */
  async _fetch(method, path, body, signal, quiet = false) {
    if (!quiet) this._asked(method, path, body);
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
   * A request whose answer is JSON.
   * @param {string} method
   * @param {string} path
   * @param {unknown} [body]
   * @param {{signal?: AbortSignal, quiet?: boolean}} [how]
   * @returns {Promise<any>}
   */
  async ask(method, path, body, how = {}) {
    const answer = await this._fetch(method, path, body, how.signal, how.quiet);
    try {
      return await answer.json();
    } catch (error) {
      throw asLost(error, "The server went away in the middle of an answer.");
    }
  }

  /**
   * The pieces of a completion as they come.
   * @param {Record<string, unknown>} body
   * @param {AbortSignal} [signal]
   * @returns {AsyncGenerator<any, void, void>}
   */
  async *complete(body, signal) {
    const answer = await this._fetch("POST", "/v1/completions", { ...body, stream: true }, signal);
    try {
      for await (const data of eventsOf(answer)) {
        if (data === "[DONE]") return;
        const piece = JSON.parse(data);
        if (piece.error) throw new Refused(200, String(piece.error.message), String(piece.error.code ?? ""));
        yield piece;
      }
    } catch (error) {
      throw asLost(error, "The server went away in the middle of an answer.");
    }
    throw new Lost("The server went away in the middle of an answer.");
  }

  /**
   * Open this page's place at the server. Sessions whose names begin with it live as long as the connection.
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
        // it ended, whatever ended it
      }
      ended();
    })();
    return found;
  }
}
