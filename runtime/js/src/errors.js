// @ts-check
/** The errors that a caller can meet: one line each, with what was found, what was expected, and what to do. */

/** Base class of every error that is thrown on purpose. */
export class TxlError extends Error {
  /** @param {string} said */
  constructor(said) {
    super(printable(said));
    this.name = this.constructor.name;
  }
}

/** An argument has a wrong type, shape or range. */
export class UsageError extends TxlError {}

/** A request is right, and this runtime cannot do it; Python's can. */
export class UnsupportedError extends UsageError {}

/** A bundle is missing, altered, inconsistent or written by a newer version. */
export class BundleError extends TxlError {}

/** An engine is missing, or cannot run this bundle. */
export class BackendError extends TxlError {}

/** A self-test did not pass. */
export class CheckError extends TxlError {}

/** Return a text as one line: line ends, control characters and halves of characters as escapes. @param {string} text */
function printable(text) {
  return text.replace(/[\p{C}\u2028\u2029]/gu, (sign) => `\\u${(sign.codePointAt(0) ?? 0).toString(16).padStart(4, "0")}`);
}

/** Return a text for a quotation in a message, cut to 80 characters. @param {string} text */
export function brief(text) {
  return text.length <= 80 ? text : `${text.slice(0, 77)}...`;
}

/** Return a short text of any argument, for a message. @param {any} value @returns {string} */
export function shown(value) {
  if (typeof value === "string") return brief(`'${value}'`);
  if (ArrayBuffer.isView(value)) return brief(`[${[.../** @type {any} */ (value).slice(0, 30)].join(", ")}]`);
  if (Array.isArray(value)) return brief(`[${value.slice(0, 30).map(shown).join(", ")}]`);
  if (value instanceof Map || typeof value === "function") return `a ${value.constructor.name}`;
  try {
    return brief(typeof value === "object" ? JSON.stringify(value) : String(value));
  } catch {
    return `a ${typeof value}`;
  }
}

/** Return the numbers of a list for a message, at most 8. @param {ArrayLike<number>} numbers */
export function few(numbers) {
  const first = Array.from(numbers).slice(0, 8).join(", ");
  return numbers.length <= 8 ? `[${first}]` : `[${first}] … (${numbers.length} in all)`;
}

/** Return "1, 2 or 4" of numbers in any order. @param {Iterable<number>} numbers */
export function listed(numbers) {
  const found = [...new Set(numbers)].sort((a, b) => a - b);
  return found.length > 1 ? `${found.slice(0, -1).join(", ")} or ${found.at(-1)}` : String(found[0]);
}

/** Return the text of a library's error as one line; a long one loses its middle. @param {unknown} error */
export function oneLine(error) {
  const text = (error instanceof Error ? error.message : String(error)).split(/\s+/).join(" ");
  return text.length <= 360 ? text : `${text.slice(0, 180)} … ${text.slice(-180)}`;
}

/** Return whether a value is a whole number that floating point holds exactly. @param {unknown} value @returns {value is number} */
export function isWhole(value) {
  return typeof value === "number" && Number.isSafeInteger(value);
}

/**
 * Refuse options that a function does not know.
 * @param {string} what the function
 * @param {object} options
 * @param {string[]} known
 */
export function checkOptions(what, options, known) {
  if (options === null || typeof options !== "object") throw new UsageError(`the options of ${what} are ${shown(options)}, expected an object with some of ${known.join(", ")}; leave them out`);
  const odd = Object.keys(options).find((name) => !known.includes(name));
  if (odd !== undefined) throw new UsageError(`${what} has no option ${shown(odd)}, expected some of ${known.join(", ")}; take it out`);
}
