"""A job of slime whose processes die: `python -m tests.faults.slime_workers URL NAMESPACE FOLDER`.

One trainer and four makers, of which three draw prompts from the data source and one has prompts of
its own. Each process is replaced when it has killed itself with SIGKILL at a chosen moment of its
work. They are forked, so that torch is imported once. The trainer prints each rollout that it has
saved. When it has trained its last one the makers are killed, and the program ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redrb.compat.sample_groups import generation
from redrb.compat.sample_groups.trained import TrainedFiles
from redrb.compat.slime import RedrbDataSource, generate_rollout, put_groups
from redrb.errors import StoreUnavailable
from redrb.stream import Lease
from tests.framework_stand_ins import Sample, arguments, install

ROLLOUTS = 24
BATCH = 4
SAVE_EVERY = 2

TRAINER_DEATHS = [
    ("noted", 2),  # the file of a rollout is written, and nobody has its groups
    ("trained", 3),
    ("saved", 1),  # the model is saved, and `save` is not called
    ("acknowledging", 3),  # in the middle of `save`
    ("older", 3),  # `save` has returned; the next run finds this checkpoint damaged
    ("trained", 2),
    ("saved", 2),
    ("", 0),
]
MAKER_DEATHS = [
    ("generating", 5),
    ("stored", 3),  # a finished group is stored, and its prompt is not acknowledged
    ("put", 4),
    ("giving back", 2),  # what was generated is stored, and the prompt is not released
    ("generating", 2),
    ("stored", 2),
]


class Death:
    """Kills this process when it reaches a point for the n-th time."""

    def __init__(self, point: str, count: int) -> None:
        self.point, self.left = point, count

    def at(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, owner: Any, name: str, point: str) -> None:
        self._patch(owner, name, lambda call: (self.at(point), call())[1])

    def after(self, owner: Any, name: str, point: str) -> None:
        self._patch(owner, name, lambda call: (call(), self.at(point))[0])

    def _patch(self, owner: Any, name: str, run: Callable[[Callable[[], Any]], Any]) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: run(lambda: method(*given, **named)))


def checkpoints(folder: str) -> list[Path]:
    """Return the checkpoints, the newest last."""
    return sorted(Path(folder).glob("model-*.json"), key=lambda path: int(path.stem[6:]))


def train(args: SimpleNamespace, death: Death) -> None:
    """Train as slime's train_async.py: a model is the list of the groups that it has trained."""
    death.after(TrainedFiles, "write", "noted")
    source = RedrbDataSource(args)
    model, last = [], -1
    if found := checkpoints(args.load):
        model, last = json.loads(found[-1].read_text()), int(found[-1].stem[6:])
    source.load(last)
    death.before(Lease, "ack", "acknowledging")
    following = generate_rollout(args, last + 1, source)
    for rollout_id in range(last + 1, ROLLOUTS):
        current = following
        if rollout_id + 1 < ROLLOUTS:
            following = generate_rollout(args, rollout_id + 1, source)
        model += [group[0].tokens[0] for group in current.samples]
        if rollout_id % SAVE_EVERY == SAVE_EVERY - 1:
            part = Path(args.save, "part")
            part.write_text(json.dumps(model))
            part.rename(Path(args.save, f"model-{rollout_id}.json"))
            death.at("saved")
            source.save(rollout_id)
            print(rollout_id, flush=True)
            death.at("older")
        death.at("trained")
    os._exit(0)


def make(args: SimpleNamespace, death: Death, maker: int) -> None:
    """Put groups without end; each is noted in a journal when its put has returned."""
    death.before(Lease, "_end_parts", "stored")
    death.before(generation, "release", "giving back")
    source = RedrbDataSource(args) if maker < 3 else None
    journal = Path(args.save, f"journal-{maker}").open("ab", buffering=0)  # noqa: SIM115
    own = (maker << 50) + (os.getpid() << 20)
    while True:
        groups = source.get_samples(2) if source else [[Sample(), Sample()] for _ in range(2)]
        death.at("generating")
        marks = []
        if source and groups[0][0].group_index % 3 == 0 and not groups[0][0].tokens:
            groups[0][0].tokens = [0]
            source.add_samples([groups.pop(0)])  # it was aborted
        for group in groups:
            own += 1
            marks.append(group[0].group_index if source else own)
            for sample in group:
                sample.tokens, sample.status = [marks[-1]], Sample.Status.COMPLETED
        if source:
            source.put(groups)
        else:
            put_groups(groups, args=args)
        death.at("put")
        journal.write("".join(f"{mark}\n" for mark in marks).encode())


def keep_running(work: Callable[[Death], None], deaths: list[tuple[str, int]], folder: str) -> None:
    """Run a process and, whenever it has died, the next one."""
    left = deaths[::-1]
    while left:
        point, count = left[-1]
        child = os.fork()
        if not child:
            try:
                work(Death(point, count))
            except StoreUnavailable:
                os._exit(2)  # Redis is away: it is started again
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 1:
            os._exit(1)
        if status != 2:
            left.pop()
        if point == "older" and status < 0:
            checkpoints(folder)[-1].unlink()


def main() -> None:
    url, namespace, folder = sys.argv[1:]
    install()
    args = arguments(
        url,
        namespace,
        folder,
        redrb_timeout=None,
        redrb_keep_checkpoints=1,
        redrb_stream={"limit": 60, "lease_ms": 400, "max_deliveries": 1000},
        prompts=7,
        rollout_batch_size=BATCH,
        save_interval=SAVE_EVERY,
    )
    supervisors = []
    for maker in range(4):
        supervisor = os.fork()
        if not supervisor:
            os.setpgid(0, 0)
            keep_running(lambda death: make(args, death, maker), MAKER_DEATHS * 20, folder)  # noqa: B023
            os._exit(0)
        supervisors.append(supervisor)
    trainer = os.fork()
    if not trainer:
        keep_running(lambda death: train(args, death), TRAINER_DEATHS, folder)
        os._exit(0)
    _, status = os.waitpid(trainer, 0)
    for supervisor in supervisors:
        os.killpg(supervisor, signal.SIGKILL)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
