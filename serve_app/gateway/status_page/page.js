// Looks at the gateway again and again, and shows what it says.

import { key, readiness, Refused } from "./endpoint.js";
import { offer, stop } from "./playground.js";
import { failures, models, setText } from "./tables.js";

const LOOK_MS = 2_000;
const HIDDEN_MS = 30_000;
const LONGEST_MS = 30_000;

const element = (id) => document.getElementById(id);
let timer = null;
let failed = 0; // looks in a row

async function look() {
  clearTimeout(timer);
  timer = null;
  const asked = key.get();
  try {
    const told = await readiness();
    if (asked !== key.get()) return look(); // a look with another key than the one that holds now
    failed = 0;
    if (told.models) show(told);
    else return wantKey(asked ? "This key is not known here." : "");
  } catch (error) {
    failed += 1;
    missing(error instanceof Refused ? `The gateway cannot say: ${error.message}` : "The gateway does not answer.");
  }
  clearTimeout(timer); // of a look that began meanwhile
  timer = setTimeout(look, pause());
}

function pause() {
  const soon = Math.min(LOOK_MS * 2 ** failed, LONGEST_MS);
  return document.hidden ? Math.max(soon, HIDDEN_MS) : soon;
}

/** A look is due before its time: unless one is under way, or a key is waited for. */
function lookNow() {
  if (timer !== null && !document.hidden) look();
}

function show(told) {
  element("key-form").hidden = true;
  element("content").hidden = false;
  element("forget").hidden = !key.get();
  delete document.body.dataset.away;
  setText(element("connection"), "Connected");
  element("source").hidden = false;
  setText(element("gateway"), told.gateway);
  setText(element("answered"), new Date().toLocaleTimeString());
  const entries = Object.entries(told.models).sort(([one], [other]) => (one < other ? -1 : 1));
  models.show(new Map(entries.map(([name, model]) => [name, { name, ...model }])));
  element("no-models").hidden = entries.length > 0;
  setText(element("conflicts"), told.conflicts.map((conflict) => `Conflict: ${conflict}`).join("\n"));
  failures.show(new Map(told.failures.map((failure) => [JSON.stringify(failure), failure])));
  element("no-failures").hidden = told.failures.length > 0;
  offer(told.ids);
}

function missing(why) {
  document.body.dataset.away = "";
  setText(element("connection"), `${why} Trying again.`);
}

function wantKey(fault) {
  key.forget();
  stop();
  models.show(new Map());
  failures.show(new Map());
  offer({});
  element("content").hidden = true;
  element("forget").hidden = true;
  element("source").hidden = true;
  element("key-form").hidden = false;
  setText(element("connection"), "A key is needed");
  delete document.body.dataset.away;
  setText(element("key-fault"), fault);
  element("key").focus();
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(element("key").value.trim());
  element("key").value = "";
  look();
});
element("forget").addEventListener("click", () => {
  key.forget();
  if (timer !== null) look();
});
document.addEventListener("visibilitychange", lookNow);
addEventListener("online", lookNow);

look();
