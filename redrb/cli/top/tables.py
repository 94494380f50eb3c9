"""The tables of the picture: tasks, workers, tables, weights, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from redrb.cli.output import age, size
from redrb.cli.top.text import (
    BAD,
    DIM,
    GOOD,
    NOTE,
    WARN,
    Column,
    amount,
    fitted,
    line,
    rate,
    short,
    sparkline,
    time_of,
)
from redrb.watch.state.histogram import Histogram, bucket_names
from redrb.watch.state.history import History
from redrb.watch.state.model import (
    Staleness,
    State,
    TableState,
    TaskState,
    WeightsState,
    WorkerState,
)
from redrb.words import counted

_CURVES = (6, 12)
"""Columns of a curve in the table of tasks: on a narrow terminal, and on others."""

_NARROW = 100

_LOOKS = 120
"""Newest points of a curve in the table of tasks: two minutes, at a look each second."""

LIFE = {"live": GOOD, "silent": WARN, "dead": BAD, "ended": DIM}


def task_table(
    tasks: Sequence[TaskState], total: int, history: History, width: int | None
) -> list[Text]:
    """Return the table of tasks."""
    curve = _CURVES[width is None or width >= _NARROW]
    columns = (
        Column(f"TASKS ({total:,})", 12, left=True),
        Column("put/s", 5),
        Column("acked/s", 7),
        Column("waiting", 7),
        Column("last 2 min" if curve > 9 else "2 min", curve, 4, left=True),
        Column("leased", 6, 2),
        Column("dead", 4, 1),
        Column("stale", 5, 2),
        Column("rights", 9, 3),
        Column("stored", 9, 6),
        Column("acked/s, 2 min", 14, 8, left=True),
        Column("waits", 24, 7, left=True),
        Column("size", 9, 9),
        Column("samples/s", 9, 10),
        Column("memory", 9, 11),
        Column("order", 12, 12, left=True),
        *([Column("sessions", 16, 2)] if any(map(_sessions, tasks)) else []),
    )
    rows = [[*_task_row(task, history, curve), line(_sessions(task))] for task in tasks]
    return fitted(columns, [row[: len(columns)] for row in rows], width)


def _sessions(task: TaskState) -> str:
    """Return the open sessions of a task; "" if it never had one."""
    sessions = task.main.stats.sessions if task.main else None
    silent = f", {short(sessions.silent)} silent" if sessions and sessions.silent else ""
    return f"{short(sessions.open)}{silent}" if sessions else ""


def _task_row(task: TaskState, history: History, curve: int) -> list[Text]:
    main = task.main
    if main is None:
        why = " (not readable)" if not task.readable else ""
        return [line(task.name, (why, DIM)), *[line()] * 15]
    stats, rates = main.stats, task.rates
    behind = main.staleness.waiting.mean
    rights = stats.admission
    waits = {
        "put": stats.producers_waiting,
        "take": stats.consumers_waiting,
        "right": rights.waiting if rights else 0,
    }
    full = bool(stats.limit) and stats.stored >= stats.limit
    stored = amount(stats.stored)
    if stats.limit:
        stored = f"{short(stats.stored)}/{short(stats.limit)}"
    return [
        line(task.name),
        line(rate(rates.put if rates else None)),
        line(rate(rates.acked if rates else None)),
        line(amount(stats.ledger.waiting)),
        line((sparkline(history.curve(task.name, "waiting")[-_LOOKS:], curve), NOTE)),
        line(amount(stats.ledger.leased)),
        line((short(stats.dead_letters), BAD if stats.dead_letters else "")),
        line("-" if behind is None else f"{behind:.1f}"),
        line(f"{short(rights.held)}/{short(rights.most)}" if rights else ""),
        line((stored, WARN if full else "")),
        line((sparkline(history.curve(task.name, "acked")[-_LOOKS:], curve), GOOD)),
        line(", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in waits.items() if n)),
        line(size(task.stored_bytes)),
        line(rate(rates.samples_acked if rates else None)),
        line("" if task.memory_bytes is None else size(task.memory_bytes)),
        line(task.order),
    ]


def worker_table(task: TaskState | None, name: str, width: int | None) -> list[Text]:
    """Return the table of the workers of a task."""
    workers = task.workers if task else ()
    total = task.workers_total if task else 0
    columns = (
        Column(f"WORKERS of {name} ({total:,})" if name else "WORKERS (0)", 21, left=True),
        Column("does", 7, left=True),
        Column("life", 6, left=True),
        Column("weights", 13, left=True),
        Column("groups/s", 8, 1),
        Column("waits for", 12, left=True),
        Column("seen", 7, 3),
        Column("holds", 20, 4, left=True),
        Column("host", 20, 5, left=True),
        Column("pid", 7, 5),
        Column("runs for", 8, 6),
        Column("redrb", 7, 7, left=True),
        Column("groups", 6, 8),
        Column("figures", 40, 9, left=True),
    )
    table = fitted(columns, [_worker_row(worker) for worker in workers], width)
    if workers or not name:
        return table
    why = "no worker has announced itself" if task else f"there is no task {name} now"
    return [*table, line((f"  {why}", DIM))]


def _worker_row(worker: WorkerState) -> list[Text]:
    waits = f"{worker.waits_for} {time_of(worker.waits_s)}" if worker.waits_for else ""
    holds = {"group": worker.leased, "right": worker.rights}
    return [
        line(worker.label or worker.name),
        line(worker.role),
        line((worker.life, LIFE[worker.life])),
        weights_in_use(worker),
        line(rate(worker.groups_per_s)),
        line((waits, WARN if worker.waits_s >= 1 else "")),
        line((age(worker.seen_s), "" if worker.life == "live" else WARN)),
        line(", ".join(counted(number, name) for name, number in holds.items() if number)),
        line(worker.host),
        line(str(worker.pid or "")),
        line(age(worker.uptime_s)),
        line(worker.redrb),
        line(amount(worker.groups)),
        line((", ".join(f"{name} {value:.3g}" for name, value in worker.metrics.items()), DIM)),
    ]


def weights_in_use(worker: WorkerState) -> Text:
    """Return the weight version that a worker uses, and how far it was behind at its heartbeat.

    It is "-" of a trainer or a stage that announces none: it may have published some all the same.
    """
    if not worker.weight_version:
        return line(("none" if worker.role == "maker" else "-", DIM))
    if not worker.behind:
        return line(f"{worker.weight_version}")
    return line(f"{worker.weight_version}, ", (f"{worker.behind} behind", WARN))


def weights_table(state: State, width: int | None) -> list[Text]:
    """Return the table of published weights."""
    columns = (
        Column(f"WEIGHTS ({len(state.weights):,})", 13, left=True),
        Column("version", 7),
        Column("kind", 5, 2, left=True),
        Column("size", 8, 1),
        Column("age", 7),
        Column("in use", 26, 3, left=True),
        Column("kept", 4, 5),
        Column("in redis", 8, 6),
        Column("read by", 7, 7),
    )
    rows = [_weights_row(weights, state) for weights in state.weights]
    return fitted(columns, rows, width)


def tables_table(state: State, width: int | None) -> list[Text]:
    """Return the list of tables; below each of them the tasks that claim its rows."""
    columns = (
        Column(f"TABLES ({len(state.tables):,})", 13, left=True),
        Column("rows", 7),
        Column("waiting", 7),
        Column("leased", 6, 2),
        Column("consumed", 8, 1),
        Column("size", 9, 1),
        Column("retained", 8, 3),
        Column("limit", 16, 4),
        Column("run", 4, 5),
        Column("changed", 7, 6),
        Column("marks", 24, 7, left=True),
    )
    rows = [row for table in state.tables for row in _rows_of_table(table, state.time)]
    return fitted(columns, rows, width)


def _rows_of_table(table: TableState, now_s: float) -> Iterator[list[Text]]:
    if not table.readable:
        yield [line(table.name, (" (not readable)", DIM)), *[line()] * 10]
        return
    limits = [f"{table.limit:,}"] if table.limit else []
    limits += [size(table.max_bytes)] if table.max_bytes else []
    yield [
        line(table.name),
        line(amount(table.rows)),
        *[line()] * 3,
        line(size(table.bytes)),
        line(amount(table.retained)),
        line(", ".join(limits)),
        line(str(table.run or "")),
        line(age(max(0.0, now_s - table.changed_s)) if table.change else ""),
        line(", ".join(sorted(table.marks, key=table.marks.__getitem__))),
    ]
    for claim in table.claims:
        counts = (claim.waiting, claim.leased, claim.consumed)
        shown = [line("-" if count is None else amount(count)) for count in counts]
        yield [line((f"  {claim.name}", NOTE)), line(), *shown, *[line()] * 6]


def _weights_row(weights: WeightsState, state: State) -> list[Text]:
    if not weights.readable:
        return [line(weights.name, (" (not readable)", DIM)), *[line()] * 8]
    return [
        line(weights.name),
        line(f"{weights.version}"),
        line(weights.kind),
        line(size(weights.nbytes)),
        line(age(weights.age_s)),
        users(weights, state),
        line(f"{weights.versions}"),
        line(size(weights.stored_bytes)),
        line(f"{weights.pins}" if weights.pins else ""),
    ]


def users(weights: WeightsState, state: State) -> Text:
    """Return how many live makers use which versions, the newest first.

    Makers that do not name their weights are counted only if these are the only ones.
    """
    names = (weights.name, "") if len(state.weights) == 1 else (weights.name,)
    makers = (one for task in state.streams for one in task.workers if one.role == "maker")
    versions = Counter(
        maker.weight_version for maker in makers if maker.alive and maker.weights_name in names
    )
    parts = [
        f"{versions[version]} makers: {version or 'none'}"
        for version in sorted(versions, reverse=True)
    ]
    old = any(version < weights.version for version in versions)
    return line((", ".join(parts).replace("1 makers", "1 maker"), WARN if old else ""))


def staleness_table(name: str, staleness: Staleness, width: int | None) -> list[Text]:
    """Return the histograms of a consumer group: waiting, leased, and taken groups."""
    histograms = {
        "waiting": staleness.waiting,
        "leased": staleness.leased,
        "taken, ever": staleness.taken,
    }
    columns = [
        Column(f"STALENESS of {name}", 18, left=True),
        Column("mean", 6),
        Column("most", 6, 1),
        *(
            Column(f"{bucket} behind" if not at else bucket, 6 if at else 8, 2 + at)
            for at, bucket in enumerate(bucket_names())
        ),
        Column("unknown", 7, 20),
    ]
    rows = [_staleness_row(title, each) for title, each in histograms.items()]
    return fitted(columns, rows, width)


def _staleness_row(title: str, histogram: Histogram) -> list[Text]:
    mean = "-" if histogram.mean is None else f"{histogram.mean:.2f}"
    largest = "-" if histogram.largest is None else f"{histogram.largest:,}"
    return [
        line(title + (" (sample)" if histogram.sampled else "")),
        line(mean),
        line(largest),
        *(line((amount(count), NOTE if count else DIM)) for count in histogram.counts),
        line(amount(histogram.unknown)),
    ]
