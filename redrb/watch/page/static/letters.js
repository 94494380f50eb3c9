// The dead letters of a task, and their requeue.
import { ANSWER_MS, element, show, table } from "./dom.js";
import { count } from "./format.js";

const known = { task: "", number: -1, letters: null, problem: "", chosen: new Set(), done: "" };

export function letters(task) {
  const number = task.groups[0].stats.dead_letters;
  if (known.task !== task.name || known.number !== number) {
    if (known.task !== task.name) { known.chosen.clear(); known.done = ""; }
    Object.assign(known, { task: task.name, number });
    load(task.name, number);
  }
  render();
}

async function load(task, number) {
  if (!number) { known.letters = []; known.problem = ""; return; }
  try {
    const answer = await fetch(`api/letters?task=${encodeURIComponent(task)}`, { signal: AbortSignal.timeout(ANSWER_MS) });
    const data = await answer.json();
    if (known.task !== task) return;
    known.problem = answer.ok ? "" : data.error;
    known.letters = answer.ok ? data : [];
  } catch {
    known.problem = "The dashboard does not answer.";
  }
  const listed = new Set((known.letters || []).map(keyOf));
  for (const key of known.chosen) if (!listed.has(key)) known.chosen.delete(key);
  render();
}

const keyOf = (letter) => `${letter.group}/${letter.id}`;

function render() {
  const { letters: list, number, problem, chosen, done } = known;
  show("letters-list", [list, number, problem, [...chosen], done], () => {
    if (problem) return element("p", { class: "note" }, `They cannot be read: ${problem}`);
    if (!number) return [done && element("p", { role: "status" }, done), element("p", {}, "None.")];
    if (!list) return element("p", { class: "note" }, "They are being read.");
    return [
      list.length < number ? element("p", { class: "note" }, `The newest ${count(list.length)} of ${count(number)}.`) : null,
      element("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": "Dead letters" }, table("Dead letters", [
        { name: "Id", cell: (one) => element("label", {}, element("input", {
          type: "checkbox", "data-focus": `letter ${keyOf(one)}`, checked: chosen.has(keyOf(one)), disabled: !one.id,
          onchange: (event) => { event.target.checked ? chosen.add(keyOf(one)) : chosen.delete(keyOf(one)); render(); },
        }), ` ${one.id || "in parts"}`) },
        { name: "Consumer group", cell: (one) => one.group || "–" },
        { name: "Why", cell: (one) => element("span", { class: "why" }, [one.reason, one.exception, one.message].filter((text) => text).join(": ")) },
        { name: "Time", cell: (one) => one.time.replace("T", " ").slice(0, 19) },
        { name: "Failed deliveries", numeric: true, cell: (one) => count(one.failed_deliveries) },
        { name: "Last consumer", cell: (one) => one.consumer },
      ], list)),
      element("p", { class: "command" },
        element("button", { type: "button", "data-focus": "requeue", disabled: !chosen.size, onclick: requeue },
          chosen.size ? `Requeue ${count(chosen.size)}` : "Requeue"),
        element("span", { role: "status" }, done || "Choose letters; requeued groups are put again, with new ids.")),
    ];
  });
}

async function requeue() {
  const token = sessionStorage.getItem("redrb-token") || (await ask());
  if (!token) return;
  const bytes = String.fromCharCode(...new TextEncoder().encode(token)); // headers have no other letters
  const byGroup = new Map();
  for (const letter of known.letters) {
    if (known.chosen.has(keyOf(letter))) byGroup.set(letter.group, [...(byGroup.get(letter.group) || []), letter.id]);
  }
  let requeued = 0;
  for (const [group, ids] of byGroup) {
    let answer, data;
    try {
      answer = await fetch("api/requeue", {
        method: "POST", signal: AbortSignal.timeout(ANSWER_MS), headers: { "X-Redrb-Token": bytes }, body: JSON.stringify({ task: known.task, group, ids }),
      });
      data = await answer.json();
    } catch {
      known.done = "The dashboard does not answer; nobody knows whether the letters were requeued. Look again.";
      return render();
    }
    if (answer.status === 403) sessionStorage.removeItem("redrb-token");
    if (!answer.ok) { known.done = `Not requeued: ${data.error}`; return render(); }
    sessionStorage.setItem("redrb-token", token);
    requeued += data.requeued;
  }
  known.chosen.clear();
  known.done = `${count(requeued)} requeued.`;
  load(known.task, known.number);
  render();
}

// Asks for the token that `redrb dashboard` printed; "" if the person gives none.
function ask() {
  return new Promise((resolve) => {
    const input = element("input", { id: "token", type: "password", autocomplete: "off", required: true });
    const form = element("form", { method: "dialog" },
      element("p", {}, element("label", { for: "token" }, "Token that redrb dashboard printed when it started: ")), input, " ",
      element("button", { value: "yes" }, "Requeue"), " ", element("button", { value: "", formnovalidate: true }, "Cancel"));
    const dialog = element("dialog", { "aria-label": "Token" }, form);
    dialog.addEventListener("close", () => { const value = dialog.returnValue ? input.value : ""; dialog.remove(); resolve(value); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
