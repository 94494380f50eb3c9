"""The kinds of faults: each begins one, and returns how it is undone and when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.chaos.fleet import Fleet
from tests.chaos.options import Options
from tests.chaos.pair import Pair, clocks_jump
from tests.chaos.programs import ROLES
from tests.proxy import Link

Undo: TypeAlias = tuple[float, Callable[[], object]] | None
"""Seconds after which a fault ends, and the function that ends it; None: it is over at once."""

OFTEN = {"kill": 6, "pause": 4, "cut": 3, "cut_in_reply": 4, "half_close": 3, "silence": 3}
SELDOM = {
    "black_hole": 1,
    "slow": 2,
    "server_kill": 2,
    "server_pause": 2,
    "failover": 2,
    "unplanned_failover": 2,
    "memory": 1,
    "script_flush": 2,
    "client_kill": 2,
    "clock": 1,
}
KINDS = {**OFTEN, **SELDOM}
"""Kind -> how often it happens, relative to the others."""

_CLOCK_S = (-3600, -60, -5, 0, 5, 60, 3600)


@dataclass
class Faults:
    """Chooses and begins faults.

    Attributes:
        counts: Faults begun, by kind.
    """

    options: Options
    pair: Pair
    fleet: Fleet
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.options.seed)
        self._busy: set[str] = set()
        without = set(self.options.without)
        if "clock" not in without and not clocks_jump(self.pair.primary.program):
            print("no clock jumps: libfaketime is not installed, or fails in this server")
            without.add("clock")
        self._kinds = {kind: often for kind, often in KINDS.items() if kind not in without}

    def next_in_s(self) -> float:
        """Return the time until the next fault."""
        return self.dice.expovariate(1 / self.options.interval)

    def begin(self) -> tuple[str, Undo] | None:
        """Begin a fault of a random kind that is possible now; None if none is."""
        possible = dict(self._kinds)
        while possible:
            kinds = list(possible)
            kind = self.dice.choices(kinds, [possible[each] for each in kinds])[0]
            undo = getattr(self, f"_{kind}")()
            if undo is not False:
                self.counts[kind] += 1
                return kind, undo
            del possible[kind]
        return None

    def _once(self, what: str, seconds: float, undo: Callable[[], object]) -> Undo:
        """Return the end of a fault of which there is one at a time."""
        self._busy.add(what)

        def end() -> None:
            undo()
            self._busy.discard(what)

        return seconds, end

    def _role(self) -> str:
        roles = self.fleet.unpaused
        return self.dice.choices(roles, [ROLES[role].struck for role in roles])[0]

    def _kill(self) -> Undo | Literal[False]:
        self.fleet.kill(self._role())
        return None

    def _pause(self) -> Undo | Literal[False]:
        if len(self.fleet.unpaused) < 8:
            return False
        role = self._role()
        self.fleet.pause(role)
        return self.dice.choice((0.3, 1.0, 2.1, 2.4, 5.0)), lambda: self.fleet.resume(role)

    def _links(self) -> list[Link]:
        links = list(self.pair.proxy.links)
        count = self.dice.choice((1, 3, len(links)))
        return self.dice.sample(links, min(count, len(links)))

    def _cut(self) -> Undo | Literal[False]:
        self.pair.proxy.cut(self._links())
        return None

    def _cut_in_reply(self) -> Undo | Literal[False]:
        after = self.dice.choice((1, 5, 100, 5000))
        self.pair.proxy.cut_in_reply(self._links(), after)
        return None

    def _half_close(self) -> Undo | Literal[False]:
        self.pair.proxy.half_close(self._links())
        return None

    def _silence(self) -> Undo | Literal[False]:
        self.pair.proxy.silence(self._links())
        return None

    def _black_hole(self) -> Undo | Literal[False]:
        if "network" in self._busy:
            return False
        self.pair.proxy.freeze()
        return self._once("network", self.dice.uniform(0.5, 5.0), self.pair.proxy.thaw)

    def _slow(self) -> Undo | Literal[False]:
        if "slow" in self._busy:
            return False
        self.pair.proxy.slow_down()
        return self._once("slow", self.dice.uniform(0.5, 3.0), self.pair.proxy.speed_up)

    def _server_kill(self) -> Undo | Literal[False]:
        if "server" in self._busy:
            return False
        self.pair.kill()
        return self._once("server", self.dice.uniform(0.0, 4.0), self.pair.restart)

    def _server_pause(self) -> Undo | Literal[False]:
        if "server" in self._busy:
            return False
        self.pair.pause()
        return self._once("server", self.dice.uniform(0.2, 4.0), self.pair.resume)

    def _failover(self) -> Undo | Literal[False]:
        if "server" in self._busy or not self.pair.in_sync():
            return False
        self.pair.fail_over()
        return self._once("server", self.dice.uniform(0.0, 1.0), self.pair.cut)

    def _unplanned_failover(self) -> Undo | Literal[False]:
        if "server" in self._busy or not self.pair.in_sync():
            return False
        self.pair.fail_over_at_once()
        return self._once("server", self.dice.uniform(0.5, 2.0), self.pair.rejoin)

    def _memory(self) -> Undo | Literal[False]:
        if "server" in self._busy:
            return False
        self.pair.allow_memory(self.dice.choice((0.5, 1.0, 1.01)))
        return self._once(
            "server", self.dice.uniform(0.5, 4.0), lambda: self.pair.allow_memory(None)
        )

    def _script_flush(self) -> Undo | Literal[False]:
        if "server" in self._busy:
            return False
        with self.pair.admin() as client:
            client.script_flush()
        return None

    def _client_kill(self) -> Undo | Literal[False]:
        if "server" in self._busy:
            return False
        with self.pair.admin() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")
        return None

    def _clock(self) -> Undo | Literal[False]:
        for server in self.dice.choice(
            ((self.pair.primary,), (self.pair.replica,), (self.pair.primary, self.pair.replica))
        ):
            server.set_clock(self.dice.choice(_CLOCK_S))
        return None
