// @ts-check
/** Tokens and numbers as text for people, and token ids from people's text. */

const LONGEST = 120; // most characters of a token that are shown
const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
const OBEYED = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu; // controls, and marks that change the direction of text

/** Return a visible symbol for a character of OBEYED. @param {string} sign */
function symbol(sign) {
  if (sign === "\n") return "↵\n";
  if (sign === "\t") return "⇥\t";
  const code = sign.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/**
 * Show a token in a running text: line ends and tabs work and have a symbol, other controls are only a symbol.
 * @param {string} name as the server calls the token
 */
export function running(name) {
  const bytes = BYTES.exec(name);
  if (bytes) return `‹${bytes[1].replaceAll("\\x", " ").trim()}›`;
  const text = name.length > LONGEST ? `${name.slice(0, LONGEST)}…` : name;
  return text.replace(OBEYED, symbol);
}

/**
 * Show a token by itself on one line, with visible spaces.
 * @param {string} name
 */
export function alone(name) {
  return running(name).replaceAll("↵\n", "↵").replaceAll("⇥\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}

/**
 * Show a token in quotation marks.
 * @param {string} name
 */
export function quoted(name) {
  return `“${alone(name)}”`;
}

/** Write a probability, e.g. 0.123 as 12 %. @param {number} probability */
export function percent(probability) {
  const value = 100 * probability;
  if (value < 0.01) return "below 0.01 %";
  if (value >= 99.95) return "above 99.9 %"; // 100 % would claim certainty
  return `${value.toFixed(value >= 99.5 ? 1 : value >= 10 ? 0 : value >= 1 ? 1 : 2)} %`;
}

/**
 * Return the CSS class of a probability's colour: p0 from 0.5 on, … p4 below 0.01.
 * @param {number | null} logprob
 */
export function shade(logprob) {
  if (logprob === null) return "";
  const probability = Math.exp(logprob);
  return `p${[0.5, 0.2, 0.05, 0.01].filter((least) => probability < least).length}`;
}

/**
 * Count things, e.g. “1 row”, “2,000 rows”.
 * @param {number} count
 * @param {string} one
 * @param {string} [many]
 */
export function counted(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/**
 * Make a message a sentence, with a capital first letter and a full stop.
 * @param {string} text
 */
export function sentence(text) {
  return text.replace(/^\p{Ll}/u, (letter) => letter.toUpperCase()).replace(/[^.!?…]$/u, "$&.");
}

/**
 * Parse token ids that a user wrote, e.g. "1, 2 3"; throw if one is not an id below `size`.
 * @param {string} text
 * @param {number} size of the vocabulary
 */
export function idsOf(text, size) {
  return text.split(/[\s,;[\]]+/).filter(Boolean).map((part) => {
    const id = /^\d{1,9}$/.test(part) ? Number(part) : NaN;
    if (!(id < size)) throw new Error(`${quoted(part)} is no token id, expected whole numbers of 0 … ${size - 1}.`);
    return id;
  });
}
