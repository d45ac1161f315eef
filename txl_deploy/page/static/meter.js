// @ts-check
/** The meter of the memory: a bar of M rows, filled in part, with a mark at every segment. */

import { byId, drawn } from "./dom.js";
import { counted } from "./words.js";

const MARKS = 64; // most segments that have marks: those of more would merge into a grey area

/**
 * Draw the meter.
 * @param {number} fill rows that are filled
 * @param {number} rows M
 * @param {number} most limit of rows for the next generation
 * @param {number} segment the longest segment
 * @param {number} waiting tokens of the text that were not fed yet
 */
export function showMeter(fill, rows, most, segment, waiting) {
  const meter = byId("meter");
  const box = drawn("svg", { viewBox: `0 0 ${rows || 1} 10`, preserveAspectRatio: "none", "aria-hidden": "true" });
  box.append(drawn("rect", { class: "room", width: rows || 1, height: 10 }));
  box.append(drawn("rect", { class: "full", width: fill, height: 10 }));
  if (most < rows) box.append(drawn("rect", { class: "unused", x: most, width: rows - most, height: 10 }));
  for (let at = segment; at < rows && rows / segment <= MARKS; at += segment) {
    box.append(drawn("line", { class: "mark", x1: at, x2: at, y1: 0, y2: 10 }));
  }
  meter.replaceChildren(box);
  const text = rows ? `${fill.toLocaleString("en")} of ${counted(rows, "row")} filled` : "no memory";
  meter.setAttribute("aria-valuemax", String(Math.max(rows, 1)));
  meter.setAttribute("aria-valuenow", String(fill));
  meter.setAttribute("aria-valuetext", text);
  const limit = most < rows ? ` The next generation keeps and sees ${most ? `at most ${counted(most, "row")}` : "none"}; what is cut off is gone.` : "";
  const later = waiting ? ` ${counted(waiting, "token")} of the text will go in with the next generation.` : "";
  byId("meter-text").textContent = !rows ? "This model has no memory rows: it sees its segment alone." : `${text}; a mark stands every ${segment} rows, which is a segment.${later}${limit}`;
}
