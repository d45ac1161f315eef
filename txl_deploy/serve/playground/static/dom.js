// @ts-check
/** Elements of the page. Texts become text nodes: nothing that a server or a model says is ever read as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string} Child */
/** @typedef {Record<string, string | number | boolean>} Attributes */

/**
 * The element of an id; the page has it.
 * @param {string} id
 * @returns {any} its kind is known where it is used
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * @param {Element} made
 * @param {Attributes} attributes true stands for an attribute without a value, false for none
 * @param {Child[]} children
 */
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
}

/**
 * A new element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} name
 * @param {Attributes} [attributes]
 * @param {...Child} children
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  fill(made, attributes, children);
  return made;
}

/**
 * A new element of a drawing.
 * @param {string} name
 * @param {Attributes} [attributes]
 * @param {...Child} children
 */
export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  fill(made, attributes, children);
  return made;
}

/**
 * A button that does something.
 * @param {string} label
 * @param {() => void} act
 * @param {...Child} more behind the label
 */
export function button(label, act, ...more) {
  const made = element("button", { type: "button" }, label, ...more);
  made.addEventListener("click", act);
  return made;
}

/**
 * Text that is there for screen readers alone.
 * @param {string} text
 */
export function unseen(text) {
  return element("span", { class: "unseen" }, text);
}

/**
 * A table that can be scrolled by keyboard where it is wider than the page.
 * @param {string} label
 * @param {string[]} columns
 * @param {Child[][]} rows the first cell of each is its heading
 */
export function table(label, columns, rows) {
  const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))),
  );
  const made = element("table", {}, element("caption", {}, label), element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "wide", role: "region", "aria-label": label, tabindex: 0 }, made);
}
