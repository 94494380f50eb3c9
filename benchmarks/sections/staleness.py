"""A bound of staleness by admission, by expiry and by a limit, with a heavy tail of durations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import redrb
from benchmarks.options import Options
from benchmarks.server import Server, private_server
from benchmarks.simulated_job import MEAN_S, Job, run_with_killed_makers
from benchmarks.simulated_job import run as run_job
from redrb import ExperienceStream
from redrb.stream.admission.calls import Admit, AdmitReply, GiveBack

MAKERS = 8
BATCH = 64
VERSION_S = BATCH * MEAN_S / MAKERS
"""Time in which the makers make the groups of a version."""


@dataclass(frozen=True)
class Case:
    """A trainer's speed and its bound.

    Attributes:
        step: Duration of a training step, in `VERSION_S`.
        max_staleness: The bound.
    """

    step: float
    max_staleness: int

    def job(self, bound: str) -> Job:
        """Return the job with this bound."""
        stale = {"max_staleness": self.max_staleness}
        settings: dict[str, dict[str, Any]] = {
            "no bound": {},
            "expiry": stale,
            "limit": {"limit": (self.max_staleness + 1) * BATCH},
            "admission": {**stale, "groups_per_version": BATCH, "order": "admission"},
        }
        step_s = self.step * VERSION_S
        return Job(MAKERS, BATCH, step_s, settings[bound], admits=bound == "admission")


CASES = {
    "trainer-bound": Case(step=2.0, max_staleness=4),
    "maker-bound": Case(step=0.5, max_staleness=4),
    "maker-bound, tight": Case(step=0.5, max_staleness=1),
}
"""In the last one the longest rollouts last longer than the bound allows."""

BOUNDS = ("no bound", "expiry", "limit", "admission")
KILLED = "trainer-bound"
WAITERS = (10, 1000)


def run(options: Options) -> dict[str, Any]:
    """Return the discarded groups, idle time and durations by bound, and what waiting costs."""
    seconds = max(2.0, 15 * options.round_s)
    with private_server(options.server) as server:
        jobs = {
            name: {bound: _outcome(server, name, bound, seconds) for bound in BOUNDS}
            for name in CASES
        }
        for found in jobs.values():
            for each in found.values():
                beyond = each["idle_share"] - found["no bound"]["idle_share"]
                each["idle_beyond_no_bound"] = round(beyond, 4)
        killed = run_with_killed_makers(
            server.url, "killed", CASES[KILLED].job("admission"), max(8.0, seconds)
        ).summary()
        print(f"  {KILLED}, makers killed: {killed}", flush=True)
        jobs[KILLED]["admission, makers killed"] = killed
        waiting = _waiting(server, options)
    return {
        "server": server.name,
        "makers": MAKERS,
        "groups_a_version": BATCH,
        "max_staleness": {name: case.max_staleness for name, case in CASES.items()},
        "jobs": jobs,
        "server_us": waiting,
    }


def _outcome(server: Server, name: str, bound: str, seconds: float) -> dict[str, float]:
    task = f"{name}.{bound}".replace(" ", "-").replace(",", "")
    outcome = run_job(server.url, task, CASES[name].job(bound), seconds)
    found = {**outcome.summary(), **outcome.durations()}
    print(f"  {name}, {bound}: {found}", flush=True)
    return found


def _waiting(server: Server, options: Options) -> dict[str, dict[str, float]]:
    """Return the medians of the costs of a right and a look, by the number of waiting makers."""
    calls = 500 if options.quick else 5000
    rounds = [
        {makers: _cost_of_waiting(server, calls, makers) for makers in WAITERS}
        for _ in range(options.rounds)
    ]
    found = {
        kind: {str(n): median(each[n][kind] for each in rounds) for n in WAITERS}
        for kind in ("right", "look")
    }
    print(f"  server's microseconds by waiting makers: {found}", flush=True)
    return found


def _cost_of_waiting(server: Server, calls: int, makers: int) -> dict[str, float]:
    """Return the server's processor time of a right and of a look, in microseconds.

    One client plays all makers: they wait in the queue, the first one gets the only right, returns
    it and queues again. A look is what each waiting maker does every 10 seconds.
    """
    with redrb.connect(server.url) as client:
        settings: dict[str, Any] = {"max_staleness": 0, "groups_per_version": 1}
        stream = ExperienceStream(client, "waiting", **settings)
        stream.advance(1)
        store = stream._task.store

        def admit(maker: int) -> AdmitReply:
            waiter, ms = f"maker{maker}/{requests[maker]}", 600_000
            return store.call(Admit(waiter, 1, 1, ms, ms, ms, stream.incarnation, "s"))

        requests = [0] * (makers + 1)
        held = admit(0)
        for maker in range(1, makers + 1):
            admit(maker)
        queue, holder = deque(range(1, makers + 1)), 0
        before = server.info()["server_s"]
        for _ in range(calls):
            given = GiveBack(series=held.series, numbers=tuple(map(str, held.numbers)))
            store.call(given)
            requests[holder] += 1
            queue.append(holder)
            holder = queue.popleft()
            held = admit(holder)
            admit(queue[-1])
        between = server.info()["server_s"]
        for number in range(calls):
            admit(queue[number % len(queue)])
        after = server.info()["server_s"]
        stream.clear()
        stream.close()
    spent = {"right": between - before, "look": after - between}
    return {name: round(seconds / calls * 1e6, 1) for name, seconds in spent.items()}
