// Follows the server's events, and shows the newest state.
import { show, element } from "./dom.js";
import { age, plural } from "./format.js";
import { flow } from "./flow.js";
import { Histories } from "./history.js";
import * as panels from "./panels.js";
import { letters } from "./letters.js";
import { rollouts } from "./rollouts.js";

const SILENT_MS = 5000; // without an event for so long, the dashboard itself is away
const AGAIN_MS = 3000; // between attempts to connect

const histories = new Histories();
let view = null;
let names = [];
let heardAt = performance.now();
let lost = false; // whether the connection to the dashboard is broken

// The name of the task in the address; "" if it names none.
function wantedTask() {
  const found = /^#\/task\/(.+)$/.exec(location.hash);
  if (!found) return "";
  try {
    return decodeURIComponent(found[1]);
  } catch {
    return found[1]; // somebody has typed a % that begins no character
  }
}

// Whether it is the sum of the shards of one stream, which has no groups itself.
const isSum = (task) => task.name.endsWith("@*");

function chosenTask(tasks) {
  const wanted = wantedTask();
  const first = tasks.find(isSum) || tasks.find((task) => task.readable);
  return (wanted ? tasks.find((task) => task.name === wanted) : first) || null;
}

function taskProblem(task) {
  if (task?.groups.length) return "";
  if (task) return `The user of Redis that this dashboard has may not read task ${task.name}.`;
  return wantedTask() ? `There is no task ${wantedTask()} in this namespace.` : "";
}

export function announce(text) {
  document.getElementById("connection").textContent = text;
}

function showConnection() {
  const silent_ms = performance.now() - heardAt;
  const banner = document.getElementById("banner");
  let problem = "";
  const silent = lost || silent_ms > SILENT_MS;
  if (silent) {
    problem = `The dashboard does not answer. The figures are ${age(silent_ms / 1000 + (view?.age_s || 0))} old. Is \`redrb dashboard\` running?`;
  } else if (view?.error) {
    // the findings below say why, and what to do
    problem = view.state
      ? `Redis does not answer: the figures are ${age(view.age_s)} old.`
      : "Redis does not answer, and no figures were read yet.";
  }
  if (banner.dataset.problem !== problem.replace(/[\d.]+ (s|min|h|d)/, "")) {
    banner.dataset.problem = problem.replace(/[\d.]+ (s|min|h|d)/, ""); // the age alone is not announced again
    banner.hidden = !problem;
    banner.textContent = problem;
  }
  document.getElementById("connection").dataset.state = problem ? "old" : view ? "live" : "waiting";
  const state = problem ? `figures are ${age((view?.age_s || 0) + (silent ? silent_ms / 1000 : 0))} old` : view?.state ? "live" : "loading";
  if (document.getElementById("connection").textContent !== state) announce(state);
  document.body.classList.toggle("old", Boolean(problem));
}

function render() {
  showConnection();
  if (!view?.state && !view?.error) return; // "Loading…" stays
  show("findings-title", view.findings.length, () => document.createTextNode(
    `What is wrong${view.findings.length > 1 ? ` (${view.findings.length} findings)` : ""}`));
  show("findings-list", view.findings, () => panels.findings(view.findings, announce));
  const state = view.state;
  if (!state) return;
  document.title = titleOf(state);
  show("where", [state.namespace, state.where], () => [
    element("span", {}, `namespace ${state.namespace}`), element("span", {}, state.where)]);
  const task = chosenTask(state.tasks);
  show("tasks-table", [state.tasks, task?.name], () => panels.tasks(state.tasks, task?.name, histories));
  document.getElementById("tables").hidden = !state.tables.length;
  show("tables-table", [state.tables, Math.round(state.time)], () => panels.tables(state.tables, state.time));
  show("weights", state.weights, () => panels.weights(state.weights));
  show("server", state.servers, () => panels.servers(state.servers));
  renderTask(task, state);
}

function renderTask(task, state) {
  const problem = taskProblem(task);
  document.getElementById("task-problem").hidden = !problem;
  document.getElementById("task-problem").textContent = problem;
  document.getElementById("task").hidden = !task?.groups.length;
  if (!task?.groups.length) return;
  const main = task.groups[0];
  show("task-title", task.name, () => document.createTextNode(`Task ${task.name}`));
  show("flow", [task, state.weights], () => flow(task, state.weights));
  show("curves", [task.name, view.number], () => panels.taskCurves(histories.of(task.name)));
  show("staleness", main.staleness, () => panels.staleness(main, names));
  show("ledger", main.stats, () => panels.ledger(main.stats));
  show("admission", main.stats.admission, () => panels.admission(main.stats.admission));
  show("groups", task.groups, () => panels.consumerGroups(task.groups));
  show("workers", task.workers, () => panels.workers(task));
  show("settings", task.settings, () => panels.settings(task.settings));
  for (const part of ["rollouts", "letters"]) document.getElementById(part).hidden = isSum(task);
  if (isSum(task)) return;
  rollouts(task);
  letters(task);
}

function titleOf(state) {
  const critical = view.findings.filter((finding) => finding.severity === "critical").length;
  return `${critical ? `(${plural(critical, "critical finding")}) ` : ""}redrb ${state.namespace}`;
}

function follow() {
  const events = new EventSource("events");
  events.addEventListener("history", (event) => {
    const data = JSON.parse(event.data);
    names = data.buckets;
    histories.load(data.points);
  });
  events.addEventListener("view", (event) => {
    heardAt = performance.now();
    lost = false;
    view = JSON.parse(event.data);
    histories.add(view.points);
    render();
  });
  events.addEventListener("error", () => {
    lost = true;
    showConnection();
    if (events.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS); // else the browser tries again
  });
}

addEventListener("hashchange", () => {
  render();
  document.getElementById("task-title").focus({ preventScroll: true });
  document.getElementById("task").scrollIntoView();
});
setInterval(showConnection, 1000);
follow();
