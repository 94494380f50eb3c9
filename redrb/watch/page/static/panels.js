// The parts of the page that show a state: findings, tasks, a task's figures, workers, weights, servers.
import { curves, figure, histogram } from "./charts.js";
import { element, facts, table } from "./dom.js";
import { age, count, decimal, plural, rate, size } from "./format.js";

const SEVERITIES = { critical: "Critical", warning: "Warning", info: "Note" };

export function findings(found, announce) {
  if (!found.length) return element("p", { class: "well" }, "Nothing. All checks of this page pass.");
  return element("ul", { class: "findings" }, found.map((finding) =>
    element("li", { class: finding.severity },
      element("p", {}, element("strong", { class: "severity" }, SEVERITIES[finding.severity] || finding.severity), " ",
        element("span", { class: "subject" }, finding.subject), ": ", finding.summary),
      element("p", { class: "cause" }, finding.cause),
      finding.command ? command(finding.command, announce) : null)));
}

function command(text, announce) {
  return element("p", { class: "command" }, element("code", {}, text), " ",
    element("button", {
      type: "button", "data-focus": `copy ${text}`, "aria-label": `Copy: ${text}`,
      onclick: () => navigator.clipboard.writeText(text).then(
        () => announce("The command is copied."), () => announce("The browser did not allow copying.")),
    }, "Copy"));
}

export function tasks(list, chosen, histories) {
  if (!list.length) {
    return element("p", {}, "There are no tasks in this namespace. A maker or a trainer creates one when it starts. ",
      element("code", {}, "redrb run RECIPE"), " names the namespace after its recipe: ", element("code", {}, "redrb dashboard --namespace NAME"), " shows it.");
  }
  const main = (task) => task.groups[0]?.stats;
  const known = (get) => (task) => (main(task) ? get(task, main(task)) : "–");
  return table("Tasks of the namespace", [
    { name: "Task", cell: (task) => element("a", {
      href: `#/task/${encodeURIComponent(task.name)}`, "data-focus": `task ${task.name}`,
      "aria-current": task.name === chosen ? "true" : null }, task.name) },
    { name: "Order", cell: (task) => (task.readable ? task.order : "not readable") },
    { name: "Put/s", numeric: true, cell: (task) => figure(histories.column(task.name, "put"), rate(task.rates?.put)) },
    { name: "Trained/s", numeric: true, cell: (task) => figure(histories.column(task.name, "acked"), rate(task.rates?.acked)) },
    { name: "Waiting", numeric: true, cell: known((task, stats) =>
      figure(histories.column(task.name, "waiting"), count(stats.ledger.waiting))) },
    { name: "Leased", numeric: true, cell: known((task, stats) => count(stats.ledger.leased)) },
    { name: "Dead", numeric: true, cell: known((task, stats) => count(stats.dead_letters)) },
    { name: "Staleness", numeric: true, cell: (task) => decimal(task.groups[0]?.staleness.waiting.mean, 1) },
    { name: "Stored", numeric: true, cell: (task) => size(task.stored_bytes) },
    { name: "Live workers", numeric: true, cell: (task) => count(task.workers.filter((one) => one.life === "live").length) },
  ], list, (task) => ({ class: task.name === chosen ? "chosen" : null }));
}

export function taskCurves(history) {
  const ages = history.ages();
  return element("div", { class: "charts" },
    curves("Groups a second", ages, [
      { name: "put", values: history.values("put"), style: "one" },
      { name: "trained", values: history.values("acked"), style: "two" }], (value) => rate(value)),
    curves("Backlog", ages, [
      { name: "waiting", values: history.values("waiting"), style: "one" },
      { name: "leased", values: history.values("leased"), style: "two" }], (value) => count(Math.round(value))),
    curves("Staleness of waiting groups", ages, [
      { name: "mean", values: history.values("staleness"), style: "one" }], (value) => decimal(value, 1)),
    curves("Reward", ages, [
      { name: "newest", values: history.values("reward"), style: "one" }], (value) => decimal(value, 2)));
}

export function staleness(group, names) {
  const place = (name, one) => ({ name, counts: one.counts, mean: one.mean,
    total: one.counts.reduce((sum, value) => sum + value, 0) });
  const { waiting, leased, taken } = group.staleness;
  const places = { waiting, leased, taken };
  const unknown = waiting.unknown + leased.unknown;
  const sampled = Object.keys(places).filter((name) => places[name].sampled);
  return [histogram(names, Object.entries(places).map(([name, one]) => place(name, one))),
    sampled.length ? element("p", { class: "note" }, `Of the ${sampled.join(" and ")} groups, some were read.`) : null,
    unknown ? element("p", { class: "note" }, `${plural(unknown, "group")} without a policy version.`) : null];
}

export function ledger(stats) {
  const row = (name) => [name, count(stats.ledger[name])];
  return [
    facts([...["put", "acked", "waiting", "leased", "expired", "filtered", "evicted", "dead"].map(row),
      ["ledger", stats.ledger_balanced ? "balanced" : "NOT balanced", stats.ledger_balanced ? null : "critical"],
      ["samples put", count(stats.samples_put)], ["samples acked", count(stats.samples_acked)],
      ["requeued", count(stats.returned)], ["taken over", count(stats.taken_over)]]),
  ];
}

export function admission(rights) {
  if (!rights) return element("p", {}, "This task gives no rights: its staleness is not bounded by admission.");
  return facts([["given", count(rights.granted)], ["used", count(rights.used)], ["held", count(rights.held)],
    ["left now", count(rights.left)], ["at most begun", count(rights.most)], ["makers' requests that wait", count(rights.waiting)],
    ["returned", count(rights.returned)], ["lost with dead makers", count(rights.lost)]]);
}

// The consumer groups of a task with several; all other figures are those of the first one.
export function consumerGroups(groups) {
  if (groups.length < 2) return null;
  return [element("h3", {}, "Consumer groups"),
    element("p", { class: "note" }, `The other figures of the task are those of ${groups[0].name}.`),
    element("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": "Consumer groups", "data-focus": "consumer groups" },
      table("Consumer groups of the task", [
        { name: "Consumer group", cell: (group) => group.name },
        ...["waiting", "leased", "acked", "expired", "dead"].map((name) => ({ name, numeric: true, cell: (group) => count(group.stats.ledger[name]) })),
        { name: "consumers", numeric: true, cell: (group) => count(group.stats.consumers) },
        { name: "staleness", numeric: true, cell: (group) => decimal(group.staleness.waiting.mean, 1) },
        { name: "ledger", cell: (group) => (group.stats.ledger_balanced ? "balanced" : element("strong", { class: "critical" }, "NOT balanced")) },
      ], groups))];
}

const LIVES = { live: "live", silent: "silent", dead: "dead", ended: "ended" };

export function workers(task) {
  if (!task.workers.length) {
    return element("p", {}, "No worker has announced itself lately. Start one: ", element("code", {}, "redrb-maker RECIPE"), ".");
  }
  const rows = table("Workers of the task", [
    { name: "Worker", cell: (one) => (one.label ? [one.label, element("span", { class: "note below" }, one.name)] : one.name) },
    { name: "Role", cell: (one) => one.role },
    { name: "State", cell: (one) => element("span", { class: `life ${one.life}` },
      one.life === "live" || one.life === "ended" ? LIVES[one.life] : `${LIVES[one.life]} for ${age(one.seen_s)}`) },
    { name: "Waits for", cell: (one) => (one.waits_for ? `${one.waits_for}, ${age(one.waits_s)}` : "") },
    { name: "Groups/s", numeric: true, cell: (one) => rate(one.groups_per_s) },
    { name: "Groups", numeric: true, cell: (one) => count(one.groups) },
    { name: "Last heartbeat", numeric: true, cell: (one) => `${age(one.seen_s)} ago` },
    { name: "Weights then", numeric: true, cell: (one) => (one.weight_version
      ? `${one.weights_name} ${one.weight_version}${one.behind > 0 ? ` (${one.behind} behind)` : ""}`.trim() : "–") },
    { name: "Holds", cell: (one) => [one.leased ? plural(one.leased, "group") : "", one.rights ? plural(one.rights, "right") : ""].filter((text) => text).join(", ") },
    { name: "Figures", cell: (one) => element("span", { class: "wraps" }, Object.entries(one.metrics).map(([name, value]) => `${name} ${decimal(value)}`).join(", ")) },
    { name: "Process", cell: (one) => element("span", { class: "wraps" }, `${one.pid} on ${one.host}, for ${age(one.uptime_s)}, redrb ${one.redrb}`) },
  ], task.workers, (one) => ({ class: `worker-${one.life}` }));
  const hidden = task.workers_total - task.workers.length;
  return [rows, hidden > 0 ? element("p", { class: "note" }, `and ${count(hidden)} more`) : null];
}

// Each table, and below it the tasks that claim its rows.
export function tables(list, now_s) {
  const limits = (one) => [one.limit ? `${count(one.limit)} rows` : "", one.max_bytes ? size(one.max_bytes) : ""];
  const own = (show) => (one) => (one.rows === undefined ? "" : show(one));
  const claimed = (name) => (one) => (one[name] === undefined ? "" : one[name] === null ? "–" : count(one[name]));
  return table("Tables of the namespace", [
    { name: "Table", cell: (one) => (one.rows === undefined
      ? element("a", { href: `#/task/${encodeURIComponent(one.name)}`, "data-focus": `claim ${one.name}` }, one.name) : one.name) },
    { name: "Rows", numeric: true, cell: own((one) => (one.readable ? count(one.rows) : "not readable")) },
    { name: "Waiting", numeric: true, cell: claimed("waiting") },
    { name: "Leased", numeric: true, cell: claimed("leased") },
    { name: "Consumed", numeric: true, cell: claimed("consumed") },
    { name: "Stored", numeric: true, cell: own((one) => size(one.bytes)) },
    { name: "Retained", numeric: true, cell: own((one) => count(one.retained)) },
    { name: "Limit", cell: own((one) => limits(one).filter((text) => text).join(", ")) },
    { name: "Run", numeric: true, cell: own((one) => count(one.run)) },
    { name: "Changed", numeric: true, cell: own((one) => (one.change ? `${age(Math.max(0, now_s - one.change / 1e6))} ago` : "")) },
    { name: "Marks", cell: own((one) => Object.keys(one.marks).join(", ")) },
  ], list.flatMap((one) => [one, ...one.claims]));
}

export function weights(list) {
  if (!list.length) return element("p", {}, "No weights are published.");
  return table("Published weights", [
    { name: "Name", cell: (one) => one.name },
    { name: "Version", numeric: true, cell: (one) => count(one.version) },
    { name: "Kind", cell: (one) => one.kind },
    { name: "Size", numeric: true, cell: (one) => size(one.nbytes) },
    { name: "Stored", numeric: true, cell: (one) => size(one.stored_bytes) },
    { name: "Age", numeric: true, cell: (one) => age(one.age_s) },
    { name: "Fetching now", numeric: true, cell: (one) => count(one.pins) },
  ], list);
}

export function servers(list) {
  return list.map((one) => facts([
    ["server", `${one.kind} ${one.version}, ${one.mode}`], ["address", one.address],
    ["memory", one.maxmemory ? `${size(one.used_memory)} of ${size(one.maxmemory)}` : `${size(one.used_memory)}, no limit`],
    ["at the limit", one.maxmemory_policy || "not known", one.maxmemory_policy && one.maxmemory_policy !== "noeviction" ? "critical" : null],
    ["append-only file", one.aof ? "yes" : "no"], ["last save", one.last_save_ok ? "good" : "FAILED", one.last_save_ok ? null : "critical"],
    ["clients", `${count(one.clients)}, ${count(one.blocked_clients)} block`], ["commands a second", count(Math.round(one.commands_per_s))],
    ["processor", one.cpu_share === null ? "–" : `${(one.cpu_share * 100).toFixed(0)}% of a core`],
    ["a request takes", `${(one.latency_s * 1000).toFixed(1)} ms`], ["runs for", age(one.uptime_s)],
    ["replicas", count(one.replicas)],
  ]));
}

export function settings(all) {
  const given = Object.entries(all).filter(([, value]) => value !== "");
  return given.length ? facts(given) : element("p", {}, "All settings have their defaults.");
}
