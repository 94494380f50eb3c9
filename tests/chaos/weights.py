"""A publisher of weights, and four kinds of readers."""

from __future__ import annotations

import time

import torch

from redrb import WeightPublisher, WeightSubscriber
from redrb.connection import Client
from redrb.errors import WeightError
from tests.chaos import options, payload
from tests.chaos.worker import Worker

PUBLISH_S = 0.4
READ_S = 0.3
WAIT_S = 2.0


class Publishes(Worker):
    """Publishes a state every moment; its number grows from process to process."""

    def open(self, client: Client) -> None:
        self._publisher = WeightPublisher(
            client, options.WEIGHTS, namespace=options.NAMESPACE, anchor_every=5
        )

    def step(self) -> None:
        self.pause(PUBLISH_S)
        content = int(time.monotonic() * 100)
        state = payload.weights(content)
        with self.journal.call("publish", 3 * options.RETRY_S, content=content) as outcome:
            outcome["version"] = self._publisher.publish(state).version

    def close(self) -> None:
        self._publisher.close()


class Reader(Worker):
    """Reads versions into `state`, and journals each."""

    host_cache = False

    def open(self, client: Client) -> None:
        self.state = {name: torch.zeros_like(tensor) for name, tensor in payload.weights(0).items()}
        self.subscriber = WeightSubscriber(
            client, options.WEIGHTS, namespace=options.NAMESPACE, host_cache=self.host_cache
        )

    def poll(self) -> None:
        """Load the newest version, and check it."""
        with self.journal.call("poll", 3 * options.RETRY_S) as outcome:
            self.subscriber.poll(self.state)
            outcome["version"] = self.subscriber.version
            if self.subscriber.version is not None:
                outcome["content"], outcome["torn"] = payload.content_of(self.state)

    def close(self) -> None:
        return


class Polls(Reader):
    """Polls, and now and then fetches a kept version."""

    def step(self) -> None:
        self.pause(self.dice.uniform(0, READ_S))
        self.poll()
        if self.dice.random() < 0.1:
            self._fetch()

    def _fetch(self) -> None:
        """Fetch one of the kept versions, which may be dropped meanwhile."""
        try:
            with self.journal.call("fetch", 3 * options.RETRY_S) as outcome:
                kept = self.subscriber.versions()
                if kept:
                    state = self.subscriber.fetch(self.dice.choice(kept).version)
                    outcome["fetched"], outcome["torn"] = payload.content_of(state)
        except WeightError as error:
            if "no version" not in str(error):
                raise


class Waits(Reader):
    """Waits for each version, then loads it."""

    def step(self) -> None:
        with self.journal.call("wait", WAIT_S):
            self.subscriber.wait(self.subscriber.version or 0, timeout=WAIT_S)
        self.poll()


class Shares(Polls):
    """Polls a copy that all such readers of the host share."""

    host_cache = True


class Swaps(Reader):
    """Swaps in the versions that a standby fetches."""

    def open(self, client: Client) -> None:
        super().open(client)
        self._standby = self.subscriber.standby(self.state)

    def step(self) -> None:
        self.pause(self.dice.uniform(0, READ_S))
        with self.journal.call("swap", 0.0) as outcome:
            outcome["swapped"] = self._standby.swap()
            if self._standby.version is not None:
                outcome["content"], outcome["torn"] = payload.content_of(self.state)

    def close(self) -> None:
        self._standby.close()
