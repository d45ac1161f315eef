// @ts-check
/** Tokens and numbers as people read them. */

const LONGEST = 120; // characters of one token that are shown
const EMOJI = emoji();
const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\p{Cn}\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]/u; // the last: fillers, of which nothing is drawn

/** Emoji, which may hold joiners inside; browsers without such patterns show the joiners. */
function emoji() {
  try {
    return new RegExp("(\\p{RGI_Emoji})", "v");
  } catch {
    return /(\p{Emoji_Presentation})/u;
  }
}

/** @param {string} sign one that cannot be seen, or that turns the direction of what follows */
function symbol(sign) {
  const code = sign.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/**
 * A token in a running text: spaces and ends of lines do what they mean, everything else that cannot be seen is a symbol.
 * @param {string} name as the server calls the token
 */
export function running(name) {
  const bytes = BYTES.exec(name);
  if (bytes) return `‹${bytes[1].replaceAll("\\x", " ").trim()}›`;
  let text = name.length > LONGEST ? `${[...name.slice(0, LONGEST)].join("")}…` : name;
  text = text.replace(/(\p{M}{2})\p{M}+/gu, "$1‹…›").replace(/^\p{M}/u, "◌$&");
  return text.split(EMOJI).map((part, at) => (at % 2 ? part : plain(part))).join("");
}

/** A text without emoji, with symbols for what cannot be seen. @param {string} text */
function plain(text) {
  let seen = "";
  for (const sign of text) {
    if (sign === "\n") seen += "↵\n";
    else if (sign === "\t") seen += "⇥\t";
    else if (sign === "\u00a0") seen += "⍽";
    else seen += UNSEEN.test(sign) || (/\p{Zs}/u.test(sign) && sign !== " ") ? symbol(sign) : sign;
  }
  return seen;
}

/**
 * A token by itself, on one line: spaces are seen too.
 * @param {string} name
 */
export function alone(name) {
  return running(name).replaceAll("↵\n", "↵").replaceAll("⇥\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}

/**
 * A token in quotation marks.
 * @param {string} name
 */
export function quoted(name) {
  return `“${alone(name)}”`;
}

/** @param {number} probability */
export function percent(probability) {
  const value = 100 * probability;
  if (value < 0.01) return "below 0.01 %";
  if (value >= 99.95) return "above 99.9 %"; // nothing is certain
  return `${value.toFixed(value >= 99.5 ? 1 : value >= 10 ? 0 : value >= 1 ? 1 : 2)} %`;
}

/**
 * The class of a probability's colour, p0 for the highest.
 * @param {number | null} logprob
 */
export function shade(logprob) {
  if (logprob === null) return "";
  const probability = Math.exp(logprob);
  return `p${[0.5, 0.2, 0.05, 0.01].filter((least) => probability < least).length}`;
}

/**
 * @param {number} count
 * @param {string} one
 * @param {string} [many]
 */
export function counted(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/**
 * What is wrong, as a sentence that can stand alone.
 * @param {string} text
 */
export function sentence(text) {
  return text.replace(/^\p{Ll}/u, (letter) => letter.toUpperCase()).replace(/[^.!?…]$/u, "$&.");
}

/**
 * Token ids that somebody wrote, with commas or spaces between them.
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
