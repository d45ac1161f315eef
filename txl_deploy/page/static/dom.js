// @ts-check
/** Elements of the page. Texts become text nodes, so no text of a server or a model is parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string} Child */
/** @typedef {Record<string, string | number | boolean>} Attributes */

/**
 * Return the element of an id; throw if the page has none.
 * @param {string} id
 * @returns {any} an element; callers know its type
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * @param {Element} made
 * Set attributes and append children.
 * @param {Attributes} attributes true: without a value; false: left out
 * @param {Child[]} children
 */
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
}

/**
 * Make an HTML element.
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
 * Make an SVG element.
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
 * Make a button.
 * @param {string} label
 * @param {() => void} act is called on a click
 * @param {...Child} more children after the label
 */
export function button(label, act, ...more) {
  const made = element("button", { type: "button" }, label, ...more);
  made.addEventListener("click", act);
  return made;
}

/**
 * Make text that only screen readers see.
 * @param {string} text
 */
export function unseen(text) {
  return element("span", { class: "unseen" }, text);
}

/**
 * Make a table; one that is wider than the page can be scrolled by keyboard.
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
