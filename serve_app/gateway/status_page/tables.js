// The tables of models and failures. What the gateway tells becomes text, never HTML.

/** Touches nothing that is right already: a selection or a screen reader's place survives the next look. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
}

const number = (value) => (value == null ? "–" : String(Math.round(value)));

class Table {
  /** `columns`: one function per column of the head, `fill(cell, item)`; the first one is the row's head. */
  constructor(table, columns) {
    this.table = table;
    this.body = table.tBodies[0];
    this.columns = columns;
    this.heads = [...table.querySelectorAll("[data-column]")];
    this.rows = new Map();
  }

  /** `items`: key → item, in order. */
  show(items) {
    this.table.hidden = !items.size;
    for (const [key, row] of this.rows) {
      if (!items.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    let place = this.body.firstChild;
    for (const [key, item] of items) {
      const row = this.rows.get(key) ?? this.add(key);
      if (row === place) place = place.nextSibling;
      else this.body.insertBefore(row, place);
      this.columns.forEach((fill, index) => fill(row.cells[index], item));
    }
  }

  add(key) {
    const row = document.createElement("tr");
    row.setAttribute("role", "row");
    this.heads.forEach((head, index) => {
      const cell = document.createElement(index ? "td" : "th");
      cell.setAttribute("role", index ? "cell" : "rowheader");
      if (!index) cell.scope = "row";
      cell.className = head.className;
      cell.dataset.label = head.dataset.label ?? head.textContent;
      row.append(cell);
    });
    this.rows.set(key, row);
    return row;
  }
}

/** The cell's element of this class, made where it is missing. */
function part(cell, name, tag = "span") {
  let found = cell.querySelector(`.${name}`);
  if (!found) {
    found = document.createElement(tag);
    found.className = name;
    cell.append(found);
  }
  return found;
}

function bar(cell, share, label) {
  const progress = part(cell, "bar", "progress");
  progress.hidden = share == null;
  progress.value = share ?? 0;
  progress.setAttribute("aria-label", label);
}

function fillModel(cell, model) {
  setText(part(cell, "name"), model.name);
  setText(part(cell, "more"), [...model.also_known_as, ...model.adapters].join(", "));
}

function fillState(cell, model) {
  const state = part(cell, "state");
  state.dataset.state = model.state;
  setText(state, model.state);
  setText(part(cell, "more"), model.reason);
  const usual = model.usual_wake_s ?? model.usual_start_s;
  const left = model.ready_in_s;
  const share = left == null || usual <= left ? null : (usual - left) / usual;
  bar(cell, share, `start of ${model.name}`);
  const what = model.state === "asleep" ? "to wake" : "left";
  setText(part(cell, "left"), left == null ? "" : `about ${seconds(left)} ${what}, usually ${seconds(usual)}`);
}

function fillCache(cell, model) {
  const share = model.engines?.kv_usage ?? null;
  setText(part(cell, "value"), share == null ? "–" : `${Math.round(share * 100)} %`);
  bar(cell, share, `KV cache of ${model.name}`);
}

const text = (read) => (cell, item) => setText(cell, read(item));

export const models = new Table(document.getElementById("models"), [
  fillModel,
  fillState,
  text((model) => number(model.replicas)),
  text((model) => number(model.in_flight)),
  text((model) => number(model.waiting)),
  text((model) => number(model.held)),
  text((model) => number(model.engines?.running)),
  text((model) => number(model.engines?.waiting)),
  fillCache,
  text((model) => number(model.engines?.tokens_s)),
]);

export const failures = new Table(document.getElementById("failures"), [
  text((failure) => failure.model),
  text((failure) => new Date(failure.at * 1000).toLocaleString()),
  text((failure) => failure.route),
  text((failure) => String(failure.status)),
  text((failure) => failure.reason),
  text((failure) => failure.id || "–"),
]);
