// The rollout browser: groups of a task, read when they are asked for.
import { element, show } from "./dom.js";
import { count, decimal, plural, size } from "./format.js";

const ORDERS = { newest: "newest", stalest: "stalest", best: "best reward", worst: "worst reward", ids: "ids" };
const known = { task: "", order: "newest", status: "", ids: "", groups: null, problem: "", loading: false };

export function rollouts(task) {
  if (known.task !== task.name) Object.assign(known, { task: task.name, groups: null, problem: "", status: "" });
  const statuses = Object.keys(task.groups[0].stats.waiting);
  show("rollouts-choice", [task.name, known.order, statuses], () => choice(statuses));
  render();
}

function choice(statuses) {
  const options = (pairs, chosen) => pairs.map(([value, text]) => element("option", { value, selected: value === chosen }, text));
  return element("form", { class: "choice", onsubmit: (event) => { event.preventDefault(); load(); } },
    element("label", {}, "Groups", element("select", { "data-focus": "order", onchange: (event) => { known.order = event.target.value; render(); } },
      options(Object.entries(ORDERS), known.order))),
    known.order === "ids"
      ? element("label", {}, "Ids, with commas", element("input", { "data-focus": "ids", value: known.ids, oninput: (event) => { known.ids = event.target.value; } }))
      : element("label", {}, "Status", element("select", { "data-focus": "status", onchange: (event) => { known.status = event.target.value; } },
        options([["", "completed"], ...statuses.filter((one) => one !== "completed").map((one) => [one, one])], known.status))),
    element("button", { type: "submit", "data-focus": "show" }, "Show"));
}

async function load() {
  Object.assign(known, { loading: true, problem: "" });
  render();
  const query = new URLSearchParams({ task: known.task, order: known.order, count: "5" });
  if (known.order === "ids") query.set("ids", known.ids.replace(/\s/g, ""));
  else if (known.status) query.set("status", known.status);
  try {
    const answer = await fetch(`api/groups?${query}`);
    const data = await answer.json();
    known.groups = answer.ok ? data : null;
    known.problem = answer.ok ? "" : data.error;
  } catch {
    known.problem = "The dashboard does not answer.";
  }
  known.loading = false;
  render();
}

function render() {
  show("rollouts-list", [known.groups, known.problem, known.loading], () => {
    if (known.loading) return element("p", { role: "status", class: "note" }, "The groups are being read.");
    if (known.problem) return element("p", { role: "status" }, `They cannot be read: ${known.problem}`);
    if (!known.groups) return null;
    if (!known.groups.length) return element("p", { role: "status" }, "No group of this kind waits.");
    return [element("p", { class: "hidden", role: "status" }, plural(known.groups.length, "group")), known.groups.map(group)];
  });
}

function group(one, at) {
  const rewards = one.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
  const facts = [one.status, plural(one.samples_total, "sample"), size(one.nbytes),
    mean === null ? null : `mean reward ${decimal(mean)}`, one.staleness === null ? null : `staleness ${count(one.staleness)}`];
  return element("details", { class: "rollout", open: at === 0 },
    element("summary", {}, `Group ${one.id}: ${facts.filter((fact) => fact).join(", ")}`),
    one.problem ? element("p", { class: "note" }, one.problem) : null,
    one.tags && Object.keys(one.tags).length ? element("p", { class: "note" }, `Tags: ${JSON.stringify(one.tags)}`) : null,
    one.extras && Object.keys(one.extras).length ? element("details", {}, element("summary", {}, "Extras"), element("pre", { class: "text", tabindex: "0" }, JSON.stringify(one.extras, null, 2))) : null,
    one.samples.map(sample));
}

function sample(one, at) {
  return element("section", { "aria-label": `Sample ${at + 1}` },
    element("p", {}, element("strong", {}, `Sample ${at + 1}`), " ",
      one.reward === null ? null : element("span", { class: "reward" }, `reward ${decimal(one.reward)}`),
      one.versions ? element("span", { class: "note" }, ` versions ${one.versions}`) : null),
    one.images.map((image) => element("img", { class: "image", src: image.data, alt: `${image.name}, ${image.width} by ${image.height} pixels` })),
    one.prompt ? element("div", {}, element("p", { class: "note" }, "Prompt"), element("div", { class: "text", tabindex: "0" }, one.prompt)) : null,
    one.tokens.length ? element("div", {}, element("p", { class: "note" }, "Response; the darker a token, the less probable it was"), tokens(one.tokens)) : null,
    element("p", { class: "note" }, one.fields.map((field) => `${field.name} ${field.dtype} [${field.shape.join(", ")}]`).join("; ")));
}

function tokens(list) {
  return element("div", { class: "text", tabindex: "0" }, list.map((token) => {
    const node = element("span", { class: "token", title: [
      token.log_prob === null ? null : `log-prob ${decimal(token.log_prob)}`,
      token.version === null ? null : `version ${token.version}`, `token ${token.id}`].filter((fact) => fact).join(", ") }, token.text);
    if (token.log_prob !== null) node.style.backgroundColor = `color-mix(in srgb, var(--two) ${Math.round(Math.min(1, -token.log_prob / 6) * 55)}%, transparent)`;
    return node;
  }));
}
