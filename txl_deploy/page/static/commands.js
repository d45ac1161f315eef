// @ts-check
/** The page's requests as curl commands. A command names the server's token as $TXL_DEPLOY_TOKEN and never contains it. */

import { button, byId, element } from "./dom.js";
import { counted } from "./words.js";

const KEPT = 8; // commands shown, the newest
const LONGEST = 20_000; // most characters of a shown command
let shown = 0;

/** @param {string} text */
function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/**
 * @param {string} method
 * @param {string} path
 * @param {any} body
 * @param {boolean} token true: the server asks for one
 */
export function asCurl(method, path, body, token) {
  const parts = ["curl"];
  if (body?.stream) parts.push("-N");
  if (method !== (body === undefined ? "GET" : "POST")) parts.push(`-X ${method}`);
  parts.push(shellQuoted(location.origin + path));
  if (token) parts.push('\\\n  -H "Authorization: Bearer $TXL_DEPLOY_TOKEN"');
  if (body !== undefined) {
    parts.push("\\\n  -H 'Content-Type: application/json'");
    parts.push(`\\\n  -d ${shellQuoted(JSON.stringify(body))}`);
  }
  return parts.join(" ");
}

/**
 * Show a request's command above the earlier ones.
 * @param {string} method
 * @param {string} path
 * @param {any} body
 * @param {boolean} token
 * @param {(text: string) => void} copy
 */
export function showCommand(method, path, body, token, copy) {
  const list = byId("commands");
  const text = asCurl(method, path, body, token);
  const title = `${method} ${path}`;
  shown += 1;
  const item = element("li", {}, element("code", {}, title));
  if (text.length > LONGEST) {
    item.append(element("p", { class: "hint" }, `This request has ${counted(text.length, "character")}, too many to show.`));
  } else {
    const made = button("Copy command", () => copy(text));
    item.append(made, element("pre", { tabindex: 0, role: "region", "aria-label": `Command ${shown}, ${title}` }, text));
  }
  list.prepend(item);
  while (list.children.length > KEPT) list.lastElementChild?.remove();
}
