// The rollout browser: groups of a task, read when they are asked for.
import { ANSWER_MS, element, show, whenOpen } from "./dom.js";
import { age, count, decimal, plural, size } from "./format.js";
import { sample } from "./sample.js";

const ORDERS = { newest: "newest", stalest: "stalest", best: "best reward", worst: "worst reward", ids: "ids" };
const STATES = { "": "any stored", leased: "leased", dead: "dead letters" };
const NONE = {
  "": "No group is stored now.", ids: "No group with these ids is stored.",
  leased: "No group is leased now.", dead: "There is no dead letter.",
};
const KEEP = "Trained groups are deleted. A second consumer group keeps what it reads, and redrb export writes what is stored.";
const known = { task: "", order: "newest", status: "", ids: "", page: null, problem: "", loading: false, answers: 0 };

export function rollouts(task) {
  if (known.task !== task.name) Object.assign(known, { task: task.name, page: null, problem: "", status: "", loading: false });
  const waiting = Object.keys(task.groups[0].stats.waiting);
  show("rollouts-choice", [task.name, known.order, waiting], () => choice(waiting));
  render();
}

function choice(waiting) {
  const options = (pairs, chosen) => pairs.map(([value, text]) => element("option", { value, selected: value === chosen }, text));
  const states = { ...Object.fromEntries(waiting.map((status) => [status, `waiting, ${status}`])), ...STATES };
  return element("form", { class: "choice", onsubmit: (event) => { event.preventDefault(); load(); } },
    element("label", {}, "Groups", element("select", { "data-focus": "order", onchange: (event) => {
      known.order = event.target.value;
      show("rollouts-choice", [known.task, known.order, waiting], () => choice(waiting));
    } }, options(Object.entries(ORDERS), known.order))),
    known.order === "ids"
      ? element("label", {}, "Ids, with commas", element("input", { "data-focus": "ids", inputmode: "numeric", required: true, value: known.ids, oninput: (event) => { known.ids = event.target.value; } }))
      : element("label", {}, "State", element("select", { "data-focus": "status", onchange: (event) => { known.status = event.target.value; } },
        options(Object.entries(states).sort(([one], [other]) => (one === "" ? -1 : other === "" ? 1 : 0)), known.status))),
    element("button", { type: "submit", "data-focus": "show" }, "Show"));
}

async function load() {
  const task = known.task;
  Object.assign(known, { loading: true, problem: "" });
  render();
  const query = new URLSearchParams({ task, order: known.order, count: "5" });
  if (known.order === "ids") query.set("ids", known.ids.replace(/\s/g, ""));
  else query.set("status", known.status);
  let data = null, problem = "";
  try {
    const answer = await fetch(`api/groups?${query}`, { signal: AbortSignal.timeout(ANSWER_MS) });
    data = await answer.json();
    if (!answer.ok) problem = data.error;
  } catch {
    problem = "The dashboard does not answer.";
  }
  if (known.task !== task) return;
  Object.assign(known, { page: problem ? null : data, problem, loading: false, answers: known.answers + 1 });
  render();
}

function render() {
  show("rollouts-list", [known.task, known.answers, known.loading], () => {
    if (known.loading) return element("p", { role: "status", class: "note" }, "The groups are being read.");
    if (known.problem) return element("p", { role: "status" }, `They cannot be read: ${known.problem}`);
    if (!known.page) return null;
    const stored = known.page.groups.filter((one) => one.state !== "gone");
    const said = [...none(known.page.groups.filter((one) => one.state === "gone"), stored), ...known.page.notes];
    return [element("p", { role: "status", class: "note" }, said.join(" ")), stored.map(group)];
  });
}

function none(gone, stored) {
  if (stored.length && !gone.length) return [];
  const text = gone.length ? `Not stored: ${gone.map((one) => one.id).join(", ")}.` : NONE[known.status] ?? `No ${known.status} group waits now.`;
  return !gone.length && ["leased", "dead"].includes(known.status) ? [text] : [text, KEEP];
}

function group(one, at) {
  const facts = [
    one.state, one.status, plural(one.samples_total, "sample"), size(one.size),
    one.reward === null ? null : `mean reward ${decimal(one.reward)}`,
    one.staleness === null ? null : `staleness ${count(one.staleness)}`];
  const node = element("details", { class: "rollout" },
    element("summary", {}, `Group ${one.id}: ${facts.filter((fact) => fact).join(", ")}`));
  whenOpen(node, () => body(one));
  node.open = at === 0;
  return node;
}

function body(one) {
  const remarks = [
    one.damaged ? `It cannot be decoded: ${one.damaged}` : null,
    versions(one),
    one.lease ? `Leased by ${one.lease.consumer} for ${age(one.lease.age_s)}.` : null,
    one.letter ? `Dead in ${one.letter.group || "parts"}: ${[one.letter.reason, one.letter.exception, one.letter.message].filter((text) => text).join(": ")}` : null,
    one.reads ? `Acknowledged ${plural(one.reads, "time")}.` : null,
    one.failed_deliveries ? `${plural(one.failed_deliveries, "failed delivery", "failed deliveries")}.` : null,
    one.group_id ? `Prompt ${one.group_id}.` : null,
    Object.keys(one.tags).length ? `Tags: ${Object.entries(one.tags).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ")}.` : null,
    ...one.notes,
  ];
  return [
    ...remarks.filter((text) => text).map((text) => element("p", { class: "note" }, text)),
    ...one.samples.map(sample)];
}

function versions(one) {
  if (one.oldest_version === null) return null;
  const newest = one.newest_version === null || one.newest_version === one.oldest_version ? "" : ` to ${one.newest_version}`;
  return `Made with weight version ${one.oldest_version}${newest}.`;
}
