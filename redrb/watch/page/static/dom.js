// Makes elements. Texts become text nodes, so nothing that comes from Redis is read as HTML.

export const ANSWER_MS = 15000; // after so long the dashboard does not answer; it gives up Redis before

const SVG = "http://www.w3.org/2000/svg";

// Characters that nobody sees: control characters, and those that turn the direction of a text.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const visible = (text) => text.replace(/\r\n/g, "\n").replace(UNSEEN, "\ufffd");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(typeof child === "string" ? visible(child) : child);
  }
  return node;
}

export function element(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function shape(name, attributes, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// Replaces the content of a place, unless it is what was shown last: selections and focus stay.
const shown = new WeakMap();
export function show(id, key, make) {
  const place = document.getElementById(id);
  const text = JSON.stringify(key);
  if (shown.get(place) === text) return;
  shown.set(place, text);
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  place.replaceChildren(...[make()].flat(3).filter((node) => node));
  if (focused) place.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// A table; each column is {name, numeric, cell(row)}. On a phone each cell is a line, with the column's name.
export function table(caption, columns, rows, rowAttributes = () => ({})) {
  return element("table", { class: "stacks" },
    element("caption", { class: "hidden" }, caption),
    element("thead", {}, element("tr", {}, columns.map((column) =>
      element("th", { scope: "col", class: column.numeric ? "number" : null }, column.name)))),
    element("tbody", {}, rows.map((row) => element("tr", rowAttributes(row), columns.map((column, at) =>
      at === 0
        ? element("th", { scope: "row" }, column.cell(row))
        : element("td", { class: column.numeric ? "number" : null, "data-name": column.name }, column.cell(row)))))));
}

// A list of names and values.
export function facts(pairs) {
  return element("dl", { class: "facts" }, pairs.filter((pair) => pair).map(([name, value, state]) =>
    element("div", { class: state || null }, element("dt", {}, name), element("dd", {}, value))));
}

// Fills a `details` when it is opened first: a page of long rollouts would take seconds otherwise.
export function whenOpen(details, make) {
  details.addEventListener("toggle", () => { if (details.open) details.append(...make()); }, { once: true });
}
