// @ts-check
/** The page's requests to its server: JSON, streamed completions, and the connection that keeps the page's sessions alive. */

/** An error for a request that the server refused, with the server's reason. */
export class Refused extends Error {
  /**
   * @param {number} status of the answer; 200 if the error came within a stream
   * @param {string} message the server's own sentence
   * @param {string} [code]
   */
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

/**
 * Yield the data of server-sent events.
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
   * @param {string} token "" if the server asks for none
   * @param {(method: string, path: string, body: unknown) => void} asked is called before each request made for the user
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
   * Send a request and parse its answer as JSON.
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
   * Yield the pieces of a completion as they come.
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
