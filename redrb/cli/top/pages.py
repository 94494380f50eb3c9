"""The pages of one task and of one worker, the help, and the picture that is printed."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from redrb.cli.output import age, size
from redrb.cli.top.heading import finding_lines, findings_head, heading
from redrb.cli.top.tables import (
    LIFE,
    staleness_table,
    tables_table,
    task_table,
    weights_in_use,
    weights_table,
    worker_table,
)
from redrb.cli.top.text import (
    DIM,
    HEAD,
    NOTE,
    Column,
    amount,
    fitted,
    line,
    rate,
    sparkline,
    time_of,
    wrapped,
)
from redrb.registry import elsewhere
from redrb.watch.state.history import History
from redrb.watch.state.model import ConsumerGroupState, State, TaskState, WorkerState
from redrb.watch.state.observer import View
from redrb.words import counted

_CURVES = {
    "put": "put/s",
    "acked": "acked/s",
    "waiting": "waiting",
    "leased": "leased",
    "staleness": "staleness",
    "reward": "reward",
}
_COUNTS = ("waiting", "leased")

HELP = """\
A group is all samples of one prompt.
put/s, acked/s   groups per second: put by makers, acknowledged by trainers
waiting          groups that no trainer has taken yet; the curve begins at 0
leased           groups that trainers hold; they return if the trainer dies
dead             dead letters: groups that were rejected, or failed too often
stale            mean staleness of waiting groups: weight versions behind
rights           rights to begin groups: held by makers / most that may be
sessions         open sessions of agents at gateways, and the silent ones
stored           groups in Redis / the limit, at which puts wait
waits            puts wait for room, takes for a batch, makers for rights
groups/s         between announcements of the worker; -: it made one so far
life             live; silent: a heartbeat is overdue; dead; ended: it said so
weights          weight version in use, and how far it was behind the newest
                 at the last heartbeat; "seen" says when that was
waits for        batch, room, right, weights or engine, and for how long
seen             time since the worker's last announcement

Tab, Shift-Tab   next list: tasks, workers, findings
up, down, j, k   select a row; also Page Up, Page Down, Home, End
Enter, a click   show all about the row; there, arrows and the wheel scroll
Escape           back
Ctrl-Z           suspend; the command fg of the shell goes on
q, Ctrl-C        end"""


def help_page() -> list[Text]:
    """Return the lines of the help."""
    return [line(each) for each in HELP.splitlines()]


def task_page(task: TaskState | None, name: str, history: History, width: int | None) -> list[Text]:
    """Return all about a task."""
    if task is None:
        return [line(f"There is no task {name!r} now.")]
    if task.main is None:
        return [line(f"This user may not read task {name!r}.")]
    stats = task.main.stats
    lines = _curve_lines(task, history, width)
    ledger = stats.ledger
    ended = ["acked", "expired", "filtered", "evicted", "dead", "leased", "waiting"]
    counts = " + ".join(f"{amount(getattr(ledger, each))} {each}" for each in ended)
    balance = f"{amount(ledger.put)} put = {counts}"
    if not ledger.balanced:
        balance = f"NOT BALANCED: {balance}"
    lines += [line(), line(("  LEDGER", HEAD))]
    lines += [line(f"  {row}") for row in wrapped(balance, (width or 100) - 2)]
    pools = ", ".join(f"{amount(count)} {status}" for status, count in stats.waiting.items())
    stored = f"{amount(stats.stored)} groups, about {size(task.stored_bytes)}"
    facts = {
        "waiting": pools or "none",
        "stored": stored + (f"; limit {stats.limit:,}" if stats.limit else "; no limit"),
        "weights": f"version {stats.version}" if stats.version else "no version known",
        "samples": f"{amount(stats.samples_put)} put, {amount(stats.samples_acked)} acknowledged",
        "returned": f"{amount(stats.returned)} groups to the queue, "
        f"{amount(stats.taken_over)} of them from dead consumers",
        "rights": _rights(task),
        "sessions": _sessions(task),
        "memory": "" if task.memory_bytes is None else size(task.memory_bytes),
        "order": task.order,
    }
    lines += [*_facts(facts), line()]
    if len(task.groups) > 1:
        rows = [_group_row(each) for each in task.groups]
        lines += [*fitted(_GROUP_COLUMNS, rows, width), line()]
    lines += [*staleness_table(task.name, task.main.staleness, width), line()]
    lines += [
        line(("  SETTINGS", HEAD)),
        *(_facts(task.settings) or [line(("  none", DIM))]),
        line(),
    ]
    return [*lines, *worker_table(task, task.name, width)]


def worker_page(worker: WorkerState | None, task: TaskState | None) -> list[Text]:
    """Return all about a worker."""
    if worker is None or task is None:
        return [line("There is no such worker now.")]
    newest = task.main.stats.version if task.main else 0
    waits = f"{worker.waits_for}, for {time_of(worker.waits_s)}" if worker.waits_for else "nothing"
    step = f"since {time_of(worker.step_s)}; the longest of late: {time_of(worker.usual_step_s)}"
    heartbeat = f"{time_of(worker.seen_s)} ago; one comes every {time_of(worker.period_s)}"
    facts: dict[str, str | Text] = {
        "worker": worker.name,
        "does": f"{worker.role} of task {task.name}",
        "life": line((worker.life, LIFE[worker.life])),
        "heartbeat": heartbeat,
        "process": f"{worker.pid} on {worker.host}" if worker.pid else worker.host,
        "runs for": age(worker.uptime_s),
        "redrb": worker.redrb,
        "weights": line(
            f"{worker.weights_name} version ".lstrip(),
            weights_in_use(worker),
            f" at that heartbeat; the newest now is {newest}",
        ),
        "rate": f"{rate(worker.groups_per_s)} groups/s, {rate(worker.samples_per_s)} samples/s",
        "in all": f"{counted(worker.groups, 'group')}, {counted(worker.samples, 'sample')}",
        "waits for": waits,
        **({"step": step} if worker.step_s else {}),
        "holds": f"{counted(worker.leased, 'leased group')}, {counted(worker.rights, 'right')}",
    }
    metrics = {name: f"{value:.6g}" for name, value in worker.metrics.items()}
    lines = _facts(facts)
    return [*lines, line(), line(("  FIGURES", HEAD)), *_facts(metrics)] if metrics else lines


_GROUP_COLUMNS = (
    Column("CONSUMER GROUPS", 16, left=True),
    Column("waiting", 7),
    Column("leased", 6),
    Column("acked", 6),
    Column("dead", 6),
    Column("consumers", 9, 1),
    Column("stale", 6, 1),
    Column("returned", 8, 3),
)


def _group_row(group: ConsumerGroupState) -> list[Text]:
    ledger, mean = group.stats.ledger, group.staleness.waiting.mean
    counts = (ledger.waiting, ledger.leased, ledger.acked, ledger.dead, group.stats.consumers)
    return [
        line(group.name),
        *(line(amount(count)) for count in counts),
        line("-" if mean is None else f"{mean:.1f}"),
        line(amount(group.stats.returned)),
    ]


def _curve_lines(task: TaskState, history: History, width: int | None) -> list[Text]:
    """Return a line with a curve for each figure of the last looks, and its newest value."""
    lines: list[Text] = []
    for name, title in _CURVES.items():
        values = history.curve(task.name, name)
        known = [value for value in values if value is not None]
        if not known:
            continue
        drawn = sparkline(values, max(10, (width or 100) - 44))
        shown = amount if name in _COUNTS else rate
        now, most = shown(known[-1]), shown(max(known))
        lines.append(
            line((f"  {title:10}", HEAD), f"{now:>8}  ", (drawn, NOTE), (f"  most {most}", DIM))
        )
    return lines


def _rights(task: TaskState) -> str:
    rights = task.main.stats.admission if task.main else None
    if rights is None:
        return ""
    return (
        f"{amount(rights.held)} held of {amount(rights.most)}; "
        f"{counted(rights.waiting, 'request', 'wait')}; "
        f"{amount(rights.lost)} taken back from dead makers"
    )


def _sessions(task: TaskState) -> str:
    sessions = task.main.stats.sessions if task.main else None
    if sessions is None:
        return ""
    return (
        f"{amount(sessions.open)} open, {amount(sessions.silent)} of them silent; "
        f"{amount(sessions.begun)} begun, with {counted(sessions.turns, 'turn')}"
    )


def _facts(facts: Mapping[str, str | Text]) -> list[Text]:
    width = max(map(len, facts), default=0)
    return [
        line((f"  {name:{width}}  ", DIM), fact)
        for name, fact in facts.items()
        if (fact.plain if isinstance(fact, Text) else fact)
    ]


def nothing(state: State) -> Text:
    """Return what to show of a namespace that has nothing."""
    return line(f"This namespace has no tasks, tables and weights; {elsewhere(state.others)}.")


def chosen_task(state: State, name: str) -> TaskState | None:
    """Return the task of a name, or the first one that claims rows of the table of this name.

    Without a name it is the first one with workers; None: it is gone.
    """
    if name:
        claiming = (task for task in state.tasks if task.table == name)
        return state.task(name) or next(claiming, None)
    streams = state.streams
    return next((task for task in streams if task.workers), next(iter(streams), None))


def picture(view: View, history: History, task: str, where: str) -> list[Text]:
    """Return the lines of a picture.

    `task` is the only one whose workers are shown; "": those of all.
    """
    blocks = [heading(view, where, None)]
    chosen = None
    if view.state is not None:
        state, chosen = view.state, chosen_task(view.state, task)
        shown = [chosen] if task else [each for each in state.streams if each.workers]
        tables = [task_table(state.shown, state.tasks_total, history, None)]
        tables += [worker_table(each, task or (each.name if each else ""), None) for each in shown]
        if state.tables:
            tables.append(tables_table(state, None))
        if state.weights:
            tables.append(weights_table(state, None))
        blocks += tables if state.tasks or state.tables or state.weights else [[nothing(state)]]
    findings = [each for finding in view.findings for each in finding_lines(finding, None)]
    blocks.append([findings_head(view.findings), *findings])
    if chosen is not None and chosen.main is not None:
        blocks.append(staleness_table(chosen.name, chosen.main.staleness, None))
    return [each for block in blocks for each in (*block, line())][:-1]
