// The way of the data: makers, task, trainers, weights, and back to the makers.
import { element } from "./dom.js";
import { age, count, plural, rate, size, waits } from "./format.js";

export function flow(task, weights) {
  const main = task.groups[0];
  const [makers, trainers, stages] = ["maker", "trainer", "stage"].map((role) =>
    task.workers.filter((worker) => worker.role === role && worker.life !== "ended"));
  const staged = stages.some((stage) => stage.life === "live"); // then nobody else need put or take
  const newest = weightsOf(task, weights);
  const rates = task.rates;
  return element("ol", { class: "flow" },
    station("Makers", workersState(makers, rates?.put || staged),
      [...workersLines(makers, !staged && rates?.put), ...sessionLines(main.stats.sessions)]),
    arrow("put", rates && rate(rates.put, "groups/s"), rates && rate(rates.samples_put, "samples/s"), !rates || !rates.put),
    station(task.name, fullState(main.stats), taskLines(main.stats, task, stages)),
    arrow("trained", rates && rate(rates.acked, "groups/s"), rates && rate(rates.samples_acked, "samples/s"), !rates || !rates.acked),
    station("Trainers", workersState(trainers, rates?.acked || staged), workersLines(trainers, !staged && rates?.acked)),
    arrow("published", newest ? `version ${count(newest.version)}` : null, newest ? `${age(newest.age_s)} ago` : null, !newest),
    station("Weights", "", newest
      ? [newest.name, `${newest.kind}, ${size(newest.nbytes)}`, plural(newest.versions, "version") + " kept"]
      : [weights.length ? "the workers do not say which they use" : "nothing is published"]),
    arrow("used by makers", using(makers, newest), "at their last heartbeat", !newest));
}

// The weights that most workers of the task name; if none names any, those of the only name.
function weightsOf(task, weights) {
  const users = (one) => task.workers.filter((worker) => worker.weights_name === one.name && worker.life !== "ended").length;
  const used = weights.filter(users).sort((one, other) => users(other) - users(one));
  return used[0] || (weights.length === 1 ? weights[0] : null);
}

function station(name, state, lines) {
  return element("li", { class: `station ${state}` }, element("h3", {}, name),
    lines.map((line) => element("p", {}, line)));
}

function arrow(verb, first, second, idle) {
  return element("li", { class: idle ? "arrow idle" : "arrow" }, element("span", { class: "verb" }, verb),
    element("strong", {}, first || "–"), second ? element("span", {}, second) : null);
}

// Other programs put and take without announcing themselves: nobody is missing while groups come.
function workersState(workers, flows) {
  if (!workers.length) return flows ? "" : "critical";
  if (workers.every((worker) => worker.life === "dead")) return "critical";
  return workers.some((worker) => worker.life !== "live") ? "warning" : "";
}

function workersLines(workers, flows) {
  const lives = (life) => workers.filter((worker) => worker.life === life).length;
  const waiting = {};
  for (const worker of workers) {
    if (worker.life === "live" && worker.waits_for) waiting[worker.waits_for] = (waiting[worker.waits_for] || 0) + 1;
  }
  return [
    workers.length ? `${count(lives("live"))} live` : flows ? "none announced" : "none",
    lives("silent") ? `${count(lives("silent"))} silent` : null,
    lives("dead") ? `${count(lives("dead"))} dead` : null,
    ...Object.entries(waiting).map(([what, number]) => `${waits(number)} for ${what === "batch" ? "a batch" : what === "right" ? "a right to begin" : what}`),
  ].filter((line) => line);
}

// Of agents at gateways, which are makers: any gateway goes on with any session.
function sessionLines(sessions) {
  if (!sessions) return [];
  const silent = sessions.silent ? `, ${count(sessions.silent)} silent` : "";
  return [`${plural(sessions.open, "open session")}${silent}`, `${plural(sessions.turns, "turn")} of ${plural(sessions.begun, "session")}`];
}

function fullState(stats) {
  if (!stats.ledger_balanced) return "critical";
  return stats.limit && stats.stored >= stats.limit ? "warning" : "";
}

function taskLines(stats, task, stages) {
  const limit = stats.limit ? ` of ${count(stats.limit)}` : "";
  return [
    waits(stats.ledger.waiting),
    `${count(stats.ledger.leased)} leased`,
    `${count(stats.stored)}${limit} stored, ${size(task.stored_bytes)}`,
    ...(stages.length ? workersLines(stages, false).map((text) => `stages: ${text}`) : []),
  ];
}

function using(makers, newest) {
  const live = makers.filter((maker) => maker.life === "live" && maker.weight_version
    && (!maker.weights_name || maker.weights_name === newest?.name));
  if (!newest || !live.length) return null;
  const current = live.filter((maker) => !maker.behind).length;
  return `${count(current)} of ${count(live.length)} current`;
}
