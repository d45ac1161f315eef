// @ts-check
/** The page's entry: it connects to where the model runs, and runs one action at a time for the page's controls. */

import { generateBoth } from "./both.js";
import { showChoices, showNoChoices } from "./choices.js";
import { showCommand } from "./commands.js";
import { measure, showLosses } from "./compare.js";
import { copyText, Desk } from "./desk.js";
import { byId, element } from "./dom.js";
import { store, stored } from "./keeping.js";
import { Local } from "./local.js";
import { showMeter } from "./meter.js";
import { alternativesOf, showNeighbours } from "./neighbours.js";
import { Lost, Refused, Server } from "./server.js";
import { showStates } from "./states.js";
import { showSteps } from "./steps.js";
import { Story } from "./story.js";
import { described, Tokens } from "./tokens.js";
import { counted, running, sentence } from "./words.js";

/** @typedef {import("./story.js").Choice} Choice */

const WITHOUT = "Each probability stands beside the one without the datastore. Both are of a text that is read from empty memory.";
const NOTHING = { ids: [], text: null };
const token = new URLSearchParams(location.search).get("token") ?? "";
const server = document.body.classList.contains("local") ? new Local() : new Server(token, (method, path, body, hasToken) => {
  showCommand(method, path, body, hasToken, (text) => copy(text, "The command"));
});
const view = new Tokens(choose);
/** @type {Story} */ let story;
/** @type {Desk} */ let desk;
/** @type {any} */ let model;
let begun = false; // true: the page has had a place at the server
let busy = false;
let streaming = false;
/** @type {{token: import("./story.js").Token, answer: import("./neighbours.js").Answer | string | null} | null} */
let behind = null; // what a datastore says about the token that was chosen last, a sentence in its place, or null for nothing
let drawing = 0; // id of the animation frame that will redraw the page; 0: none
/** @type {(() => void) | null} */ let halt = null; // the action of the button Stop; null: nothing to stop

// --- showing --------------------------------------------------------------------------------------------------------

/** @param {string} text */
function say(text) {
  byId("status").textContent = text;
}

/** Show a problem. @param {string} text "" hides the last one */
function complain(text) {
  byId("problem").hidden = text === "";
  byId("problem").textContent = sentence(text);
}

/** Redraw the page with the next frame; several calls before it make one redraw. */
function refresh() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    const held = story.fill === null ? 0 : story.fill;
    view.show(story.tokens, [Math.max(0, story.fed - held), story.fed], streaming);
    if (model.memory_length !== null) {
      const rows = model.memory_length;
      showMeter(story.fill ?? 0, rows, desk.rows ?? rows, model.segment_lengths[0], streaming ? 0 : story.lead);
    }
    if (!streaming) {
      showStates(story, goBack);
      showPanel();
    }
  });
}

/** Show the alternatives of the chosen token, or, if none is chosen, those of the next one. */
function showPanel() {
  const index = view.selected;
  byId("cut").hidden = index === null;
  const answer = index !== null && behind?.token === story.tokens[index] ? behind.answer : null;
  showNeighbours(answer);
  if (index !== null) {
    const token = story.tokens[index];
    const said = `${described(token, index)}.`;
    const next = (/** @type {Choice} */ choice) => continueWith(index, choice);
    if (answer !== null && typeof answer !== "string") showChoices(`${said} ${WITHOUT}`, alternativesOf(answer, token), token.id, "Continue with", next);
    else if (token.best.length) showChoices(said, token.best, token.id, "Continue with", next);
    else showNoChoices(`${said} Nothing stands before it that it could be predicted from.`);
  } else if (story.next.length) {
    showChoices("What may come next.", story.next, null, "Append", append);
  } else {
    showNoChoices("Choose a token to see what else could have stood there, or “Read” to see what may come next. Arrow keys move, Enter opens.");
  }
}

/** Mark the page as busy or idle. @param {boolean} now true: an action runs @param {(() => void) | null} stop */
function occupy(now, stop) {
  [busy, halt] = [now, stop];
  document.body.classList.toggle("busy", now);
  for (const id of ["generate", "read", "twice", "keep", "anew", "measure", "cut"]) byId(id).setAttribute("aria-disabled", String(now));
  byId("stop").setAttribute("aria-disabled", String(stop === null));
}

/** Say how many memory rows are filled, as a sentence to append. */
function filled() {
  return story.fill === null ? "" : ` ${story.fill} of ${counted(model.memory_length, "memory row")} are filled.`;
}

// --- actions --------------------------------------------------------------------------------------------------------

/** Return true if an action ended because the user stopped it. @param {unknown} error */
function stoppedBy(error) {
  return error instanceof Refused ? error.code === "cancelled" : error instanceof DOMException && error.name === "AbortError";
}

/**
 * Run an action and show its error, if it fails. Nothing happens while a different action runs or the connection is lost.
 * @param {() => Promise<string>} work returns the sentence to show at its end
 * @param {(() => void) | null} [stop]
 */
async function doing(work, stop = null) {
  if (busy || !byId("lost").hidden) return;
  complain("");
  occupy(true, stop);
  try {
    say(await work());
  } catch (error) {
    say("");
    if (error instanceof Lost || (error instanceof Refused && error.code === "tab" && error.status === 409)) {
      showLost("The connection is lost", error.message);
    } else if (stoppedBy(error)) say("Stopped.");
    else {
      const elsewhere = error instanceof Refused && ["session_elsewhere", "session_not_found"].includes(error.code); // it expired, or a different client used it
      const more = elsewhere ? " The text is read anew with what comes next." : "";
      complain(`${sentence(error instanceof Error ? error.message : String(error))}${more}`);
      if (elsewhere) await story.leave().catch(() => {});
    }
  } finally {
    streaming = false;
    occupy(false, null);
    if (story) refresh();
    requestAnimationFrame(() => { // after the redraw
      if (document.activeElement === document.body) view.focus(story.tokens.length - 1, true);
    });
  }
}

/** Feed the draft and generate; return a sentence about the result. @param {import("./story.js").Draft} draft @param {string} written */
async function generated(draft, written) {
  const { count, ...how } = desk.settings();
  streaming = true;
  say(`Generating ${counted(count, "token")}.`);
  view.select(null);
  const most = story.tokens.length + draft.ids.length;
  let made;
  try {
    made = await story.generate(draft, how, count, written);
  } finally {
    if (draft !== NOTHING && story.tokens.length > most) desk.clear(); // the draft is in the text now, even if the generation failed later
  }
  if (made === null) return "Stopped before the first token. Nothing has changed.";
  return `${made < count ? "Stopped after" : "Generated"} ${counted(made, "token")}.${filled()}`;
}

function stop() {
  halt = null;
  byId("stop").setAttribute("aria-disabled", "true");
  say("Stopping.");
  story.stop().catch(() => {}); // refused if the action ended in the meantime
}

/** Hide the last problem; return true if all fields are valid. */
function asked() {
  complain("");
  return desk.valid();
}

function generate() {
  if (!asked()) return;
  doing(async () => generated(await desk.draft(), desk.written), stop);
}

/** Show how probable the draft's tokens are, and the alternatives for the next one. */
function read() {
  if (!asked()) return;
  doing(async () => {
    const { count: _, ...how } = desk.settings();
    say("Reading.");
    view.select(null);
    const given = await story.look(await desk.draft(), how);
    desk.clear();
    return `Read ${counted(given, "token")}. What may come next stands under “Alternatives”.`;
  }, stop);
}

/** @param {Choice} choice */
function append(choice) {
  doing(async () => {
    const { count: _, ...how } = desk.settings();
    story.append(choice, story.next);
    await story.look(NOTHING, how);
    byId("choices-list").querySelector("button")?.focus();
    return "Appended. What may come next stands under “Alternatives”.";
  });
}

/** @param {number} index @param {Choice} choice */
function continueWith(index, choice) {
  if (!asked()) return;
  doing(async () => {
    const { best } = story.tokens[index];
    say("Going back.");
    const exact = await story.rewind(index);
    story.append(choice, best);
    return `${exact ? "" : "The state before it is gone, so the text was read anew. "}${await generated(NOTHING, desk.written)}`;
  }, stop);
}

function cut() {
  doing(async () => {
    const exact = await story.rewind(view.selected ?? story.tokens.length);
    view.select(null);
    return exact ? `The text ends before that token.${filled()}` : "The text ends before that token. The state there is gone: the text is read anew with what comes next.";
  });
}

/** @param {import("./story.js").State} state */
function goBack(state) {
  doing(async () => {
    view.select(null);
    await story.back(state);
    desk.written = state.draft;
    return `Back at state ${state.number}.${filled()}`;
  });
}

function keep() {
  doing(async () => {
    const { number } = await story.keep(desk.written, true, byId("state-name").value.trim());
    byId("state-name").value = "";
    return `State ${number} is kept.`;
  });
}

function startAnew() {
  doing(async () => {
    if (story.tokens.length) await story.keep(desk.written, false);
    await story.clear();
    byId("draft").focus();
    return "Started anew. The states before are still there.";
  });
}

/** Return `ids` of the text with the draft, and `taken`, as many of the last ids as one request may hold. */
async function wholeText() {
  const ids = [...story.tokens.map((token) => token.id), ...(await desk.draft()).ids];
  const most = Math.min(model.limits.prompt_tokens, model.limits.answer_logprobs, Math.floor(model.limits.body_bytes / 9));
  return { ids, taken: ids.slice(-most) };
}

/** Generate twice, with all of the memory and by segments without memory. */
function twice() {
  if (!asked()) return;
  const leave = new AbortController();
  doing(
    async () => {
      const { taken } = await wholeText();
      const settings = desk.settings();
      say(`Generating ${counted(settings.count, "token")} twice.`);
      await generateBoth(server, taken, settings, model.memory_length, model.segment_lengths[0], leave);
      return `Generated ${counted(settings.count, "token")} with memory and without.`;
    },
    () => leave.abort(),
  );
}

function compare() {
  const leave = new AbortController();
  doing(
    async () => {
      const { ids, taken } = await wholeText();
      if (ids.length < 2) throw new Error(`The text has ${counted(ids.length, "token")}, expected at least 2: write more.`);
      const { losses, names } = await measure(server, taken, model.memory_length, say, leave.signal);
      showLosses(losses, names, model.segment_lengths[0]);
      return `Compared ${losses.length} memory lengths over ${taken.length < ids.length ? "the last " : ""}${counted(taken.length, "token")}.`;
    },
    () => leave.abort(),
  );
}

/** @param {number | null} index @param {boolean} entered */
function choose(index, entered) {
  if (busy) return;
  view.select(index);
  showPanel();
  if (entered) (byId("choices-list").querySelector("button") ?? byId("cut")).focus();
  if (index) lookBehind(index);
}

/** Ask which neighbours are behind a token, where the server has a datastore to show. @param {number} index of the token, at least 1 */
async function lookBehind(index) {
  const most = model.limits.neighbours_tokens;
  if (!(server instanceof Server) || !most) return;
  const before = story.tokens.slice(Math.max(0, index - most), index).map(({ id }) => id);
  /** @type {typeof behind} */ const mine = (behind = { token: story.tokens[index], answer: "The datastore is searched." });
  showPanel();
  mine.answer = await server.neighbours(before).catch((error) => `${sentence(error.message)} Choose the token again.`);
  if (behind === mine && !streaming) showPanel();
}

/** @param {string} text @param {string} what */
async function copy(text, what) {
  say((await copyText(text)) ? `${what} is copied.` : "The browser does not let this page copy: mark the text and copy it.");
}

async function copyAll() {
  try {
    const tokens = story.tokens.map((token) => token.id);
    await copy(model.reads_text ? await server.textOf(tokens) : tokens.join(", "), model.reads_text ? "The text" : "The ids");
  } catch (error) {
    complain(`${error instanceof Error ? error.message : error}`);
  }
}

// --- the connection -------------------------------------------------------------------------------------------------

const ANEW = "its memory is read anew with what comes next. Other states are gone.";

/** Show that there is no connection. @param {string} title @param {string} why @param {boolean} [token] true: ask for one @param {string} [kept] the fate of the text */
function showLost(title, why, token = false, kept = ANEW) {
  byId("lost").hidden = false;
  byId("lost-title").textContent = title;
  byId("token-field").hidden = !token;
  const text = story?.tokens.length ? ` The text is still here; ${kept}` : "";
  byId("lost-why").textContent = `${sentence(why)}${text}`;
}

/**
 * Open this page's place at the server. After a reload the server may still count the old page and refuse with 429, so
 * such a page tries 20 times, 250 ms apart, before it shows the refusal.
 * @param {() => void} ended
 */
async function placed(ended) {
  const again = /** @type {any} */ (performance.getEntriesByType("navigation")[0]).type !== "navigate";
  for (let left = again && !begun ? 20 : 0; left; left -= 1) {
    const place = await server.open(ended).catch((error) => (error instanceof Refused && error.status === 429 ? null : Promise.reject(error)));
    if (place) return place;
    await new Promise((done) => setTimeout(done, 250));
  }
  return server.open(ended);
}

async function connect() {
  byId("lost").hidden = true;
  byId("lost-why").textContent = "";
  try {
    if (server instanceof Local) byId("facts").textContent = "It is being loaded.";
    const found = await server.about(Boolean(model));
    if (model && found.model_id !== model.model_id) {
      const why = `${running(found.id)} (${found.model_id.slice(0, 12)}) is not the model of this page. Load the page again to try it`;
      return showLost("Another model is served here now", why, false, "copy what you need of it first.");
    }
    if (!model && !introduce(found)) return;
    const place = await placed(() => showLost("The connection is lost", "The server has gone, or has closed this page's place."));
    const before = begun ? [] : stored(model.model_id);
    story.enter(place, begun ? undefined : before);
    begun = true;
    desk.hint();
    byId("numbers").dispatchEvent(new Event("change"));
    if (document.activeElement === document.body) byId("draft").focus({ preventScroll: true });
    say(before.length ? "Ready. The text from before is here; its memory is read anew with what comes next. Its states are gone." : "Ready.");
  } catch (error) {
    if (server instanceof Local) withoutText(error instanceof Error ? error.message : String(error));
    else if (error instanceof Refused && error.status === 401) showLost("The server asks for its token", error.message, true);
    else if (error instanceof Refused) showLost("The server does not let this page in", error.message);
    else showLost("The connection is lost", error instanceof Error ? error.message : String(error));
  }
}

/** Hide all that texts need, and say why. @param {string} why */
function withoutText(why) {
  complain(why);
  document.body.classList.add("without");
}

/** Show the model's facts and adapt the controls. @param {any} found @returns {boolean} false: it does not continue texts */
function introduce(found) {
  document.title = `${running(found.id)}, playground`;
  byId("model").replaceChildren(element("bdi", {}, running(found.id)));
  /** @type {[string, string][]} */
  const facts = [
    ["Precision", found.precision],
    ["Memory", found.memory_length === null ? "not counted in rows" : counted(found.memory_length, "row")],
    ["Segment", (found.segment_lengths ?? []).join(", ") || "none"],
    ["Context", found.context === undefined ? "" : found.context === null ? "without an end" : `${counted(found.context, "token")} at most`],
    ["Reads", found.reads_text ? "text" : found.vocab_size ? "token ids" : found.inputs.map((/** @type {any} */ entry) => entry.name).join(", ")],
    ["Vocabulary", found.vocab_size ? counted(found.vocab_size, "token") : ""],
    ["Identity", found.model_id.slice(0, 12)],
  ];
  if (server instanceof Local) facts.push(["Runs in", `this page, which asks nobody, by ${found.engine}`]);
  byId("facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const reads = found.inputs.length === 1 && found.inputs[0].role === "tokens";
  if (!reads || !found.outputs.some((/** @type {any} */ entry) => entry.role === "logprobs")) {
    if (server instanceof Local) showSteps(server, complain);
    withoutText(server instanceof Local ? "" : "This model does not continue texts: it reads named arrays, or returns no log-probabilities. Ask it with POST /v1/sessions/NAME/run.");
    return false;
  }
  model = found;
  story = new Story(server, model, refresh);
  desk = new Desk(server, model, refresh);
  byId("twice").hidden = !model.memory_length;
  if (model.memory_length === null) {
    byId("meter").hidden = byId("measure").hidden = true;
    byId("meter-text").textContent = "This model's memory is not counted in rows, so it cannot be cut or shown here.";
    byId("compared").textContent = "This model's memory is not counted in rows, so it cannot be switched off.";
  }
  return true;
}

/** @type {[string, () => void][]} */
const clicks = [["read", read], ["twice", twice], ["keep", keep], ["anew", startAnew], ["measure", compare], ["cut", cut], ["copy", copyAll]];
for (const [id, act] of clicks) byId(id).addEventListener("click", () => story && act());
byId("stop").addEventListener("click", () => halt?.());
byId("ask").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  if (story) generate();
});
byId("state-name").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && byId("keep").click());
byId("numbers").addEventListener("change", () => byId("text").classList.toggle("numbers", byId("numbers").checked));
addEventListener("pagehide", () => begun && store(model.model_id, story.tokens));
byId("again").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  if (server instanceof Server && byId("token").value) server.token = byId("token").value;
  connect();
});
byId("settings").open = matchMedia("(min-width: 40rem)").matches;
connect();
