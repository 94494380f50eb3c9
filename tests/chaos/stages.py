"""A stage: forwards groups from one task to the next, by itself or through `redrb.Stage`."""

from __future__ import annotations

import threading

from redrb import BufferItem, ExperienceStream, Stage
from redrb.connection import Client
from tests.chaos import options, payload, tasks
from tests.chaos.trainers import BATCH, TAKE_S, Trainer
from tests.chaos.worker import EXPECTED

_RUNNER_S = 30.0
"""Within which a batch of `redrb.Stage` ends, which waits for room without a timeout."""


class Forwards(Trainer):
    """Takes groups, marks their samples, and forwards them."""

    task = tasks.ROLLOUTS

    def open(self, client: Client) -> None:
        super().open(client)
        self._target: ExperienceStream = self.stream(client, tasks.FLOW)

    def close(self) -> None:
        super().close()
        self._target.close()

    def step(self) -> None:
        if self.dice.random() < 0.2:
            self._run()
        else:
            self._forward()

    def _forward(self) -> None:
        timeout = self.dice.choice((0.0, 0.5, TAKE_S))
        with self.journal.call("take", timeout) as outcome:
            lease = self._stream.take(BATCH, timeout=timeout, at_least=1)
            groups = lease.groups()
            outcome["delivered"], outcome["torn"] = payload.names_of(groups)
        names = outcome["delivered"]
        self.train()
        try:
            limit = TAKE_S + options.RETRY_S
            with self.journal.call("forward", limit, acking=names, forwarding=names) as outcome:
                lease.forward(self._target, groups, timeout=TAKE_S)
                outcome["acked"] = outcome["forwarded"] = names
        except EXPECTED:
            with self.journal.call("release", options.RETRY_S):
                if lease:
                    lease.release()
            raise

    def _run(self) -> None:
        """Let `redrb.Stage` forward a batch; the journal then knows no outcome."""

        def note(group: list[BufferItem]) -> list[BufferItem]:
            names, torn = payload.names_of([group])
            self.journal.write("forwards", acking=names, forwarding=names, torn=torn)
            return group

        stage = Stage(self._stream, self._target, note, batch=BATCH)
        timer = threading.Timer(TAKE_S, stage.stop)
        timer.start()
        try:
            with self.journal.call("stage", _RUNNER_S):
                stage.run(batches=1)
        finally:
            timer.cancel()
            timer.join()
