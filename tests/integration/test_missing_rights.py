"""A user who lacks one of the commands that a script needs changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from redis.exceptions import NoPermissionError, ResponseError

import redrb
from redrb import ExperienceStream
from redrb.connection import Client
from redrb.connection.failures import is_denied
from redrb.errors import StoreDenied
from redrb.experience import Status
from redrb.gateway.store import SessionStore
from redrb.keys import maker_key
from redrb.lua.calls import Found
from redrb.lua.commands import as_lua
from redrb.lua.scripts import needed_commands
from redrb.stream.put.calls import AskRoom, Evict
from redrb.stream.ranks.calls import AskStep, StepReply
from redrb.stream.take.calls import Drop, Finish, Leave
from redrb.stream.task.calls import (
    Discard,
    DropGroup,
    Expire,
    Fill,
    Join,
    Move,
    Open,
    Rescore,
    Settle,
    Settled,
)
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.store import TaskStore
from redrb.stream.task.stored_settings import read_settings
from redrb.train.announcements import AnnouncementReader
from redrb.weights.inspection.listing import remove_weights
from redrb.weights.wire.calls import Advance
from tests.gateway_turns import turn
from tests.samples import numbered
from tests.scenes import FOREVER_MS, Scene, script_names

WHERE = json.dumps({"tag": "score", "inverted": False, "values": [[0.25, 0.75]]})


@dataclass
class User:
    """A user of Redis from whom one command at a time is taken away.

    Attributes:
        owner: A client with all rights.
        name: Name of the user.
        client: Its client.
        namespace: Prefix of all its keys.
    """

    owner: Client
    name: str
    client: Client
    namespace: str

    def give_all(self) -> None:
        """Give the user all rights."""
        self.owner.execute("ACL", "SETUSER", self.name, "+@all")

    def lose(self, command: str) -> None:
        """Give the user all rights but one command."""
        self.owner.execute("ACL", "SETUSER", self.name, "+@all", f"-{command}")

    def content(self) -> dict[bytes, object]:
        """Return all keys of the namespace that do not expire, with their values."""
        keys: list[bytes] = self.owner.execute("KEYS", f"redrb:{{{self.namespace}*")
        return {key: self._value(key) for key in keys if self.owner.execute("PTTL", key) == -1}

    def _value(self, key: bytes) -> object:
        unordered = {b"hash": "HGETALL", b"set": "SMEMBERS"}  # DUMP keeps the order of a hash table
        how = unordered.get(self.owner.execute("TYPE", key))
        return sorted(self.owner.execute(how, key)) if how else self.owner.execute("DUMP", key)

    def check(self, script: str, call: Callable[[], Any]) -> Any:
        """Call without each command of a script in turn, and at last with all rights."""
        before = self.content()
        for command in sorted(needed_commands(script)):
            self.lose(command)
            with pytest.raises((StoreDenied, NoPermissionError, ResponseError)) as denied:
                call()
            assert isinstance(denied.value, StoreDenied) or is_denied(denied.value), denied.value
            after = self.content()
            assert after.keys() ^ before.keys() == set(), command
            assert {key for key in after if after[key] != before[key]} == set(), command
        self.give_all()
        return call()


@pytest.fixture
def user(real_url, namespace, no_heartbeats):
    """A user with all rights; no heartbeat comes between two looks at the keys."""
    name, secret = f"u-{namespace}", "c0rrect-horse"
    with redrb.connect(real_url) as owner:
        owner.execute("ACL", "SETUSER", name, "on", f">{secret}", "allkeys", "+@all")
        place = real_url.removeprefix("redis://")
        with redrb.connect(f"redis://{name}:{secret}@{place}", retry_s=2) as client:
            yield User(owner, name, client, namespace)
        owner.execute("ACL", "DELUSER", name)


def test_scripts_of_a_task(user):
    settings = {"order": "priority", "tags": ["score"], "max_staleness": 4}
    scene = Scene(user.client, user.namespace, 8, settings)
    ids = scene.fill(policy_version=5, tags={"score": 0.5}, priority=2.0)
    critic = scene.open(group="critic")
    critic.join_group()
    scene.stream.advance(5)

    def check(script, *arguments, alike=""):
        name = script if isinstance(script, str) else script.script
        return user.check(alike or name, lambda: scene.run(script, *arguments))

    first, second = scene.taking("me", 2), scene.taking("me", 1, where=WHERE)
    taken = check(first)
    assert (taken.outcome, taken.amount) == ("taken", 2)
    assert check(second).amount == 1
    lease = ("default", "me", first.slot, first.token)
    seqs = [str(int(taken.members[0]))]
    assert scene.run(Finish(*lease, "ack", seqs, samples=1, ends=False)) == "ok"
    assert check(scene.beat("me"), b"").outcome == "held"
    assert check(Drop("default", first.slot, first.token)) == Found(found=1)
    assert not check(Leave("default", "me")).more
    scene.run(DropGroup("critic"))
    assert check(Join("critic")).joined
    assert check(Advance(7)) == 7
    assert check(Move("default", Status.ABORTED, [str(ids[4])])).found == 1
    assert check(Rescore("priority", [(str(ids[5]), 3.0, 3.0)])) == 1
    assert check(Settle("default", scene.incarnation, [(str(ids[5]), 1)])) == Settled(1, 0)
    assert check(Discard("default", [str(ids[6])])) == 1
    rules = StalenessRules(3, None)
    assert check(Expire("default", 32, "keep", 12, rules, [Status.COMPLETED])).indexed
    assert not check(Fill()).more
    given = {"format": "3", "order": "priority"}
    assert check(Open("r", "who", given=given)).outcome == "ok"
    assert not check(DropGroup("critic")).more
    critic.close()
    scene.close()


def test_ranks(user):
    scene = Scene(user.client, user.namespace, 4, {})
    scene.fill()
    ask = AskStep("default", "me", 0, 1, -1)
    assert user.check(ask.script, lambda: scene.run(ask)) == StepReply()


def test_sessions(user):
    settings = {"max_staleness": 1, "groups_per_version": 2, "lease_ms": FOREVER_MS}
    stream = ExperienceStream(user.client, "math", namespace=user.namespace, **settings)
    stream.advance(7)
    with SessionStore(stream, timeout_s=600) as sessions:
        first = sessions.open("p", size=3, wait_s=5)
        opened = user.check("session/open", lambda: sessions.open("p", size=3, wait_s=5))
        stored = sessions.read(first.name)
        assert user.check("session/use", lambda: sessions.read(first.name)) == stored
        added = user.check("session/append", lambda: sessions.append(stored, turn()))
        assert sessions.read(first.name).turns == [added]
        session = sessions.read(opened.name)
        assert session.index == 1
        user.check("session/drop", lambda: sessions.drop(session.name))


@pytest.mark.parametrize("on_full", ["drop_oldest", "error"])
def test_puts(user, on_full):
    with ExperienceStream(
        user.client, "math", namespace=user.namespace, limit=2, on_full=on_full
    ) as stream:
        stream.join_group()
        for command in sorted(needed_commands("put/put")):
            user.lose(command)
            with pytest.raises(StoreDenied):
                stream.put(numbered(1))
        user.give_all()
        stream.put(numbered(1))
        assert user.owner.execute("XLEN", stream._task.store.keys.stream) == 1
        stream.put(numbered(2))
        scene = Scene(user.client, user.namespace, 0, {"limit": 2, "on_full": on_full})
        if on_full == "error":
            user.check("put/room", lambda: scene.run(AskRoom("p", FOREVER_MS, [1, 1])))
        else:
            evict = Evict("p", 1, 0, 1, 100, 1, 50)
            assert user.check("put/evict", lambda: scene.run(evict))
            stream.put(numbered(3))
        assert stream.stats().ledger.balanced
        scene.stream.close()


def test_saves_and_clears(user, tmp_path):
    file = tmp_path / "math.redrb"
    with ExperienceStream(user.client, "math", namespace=user.namespace) as stream:
        stream.join_group()
        stream.put_many([[numbered(1)], [numbered(2)]])
        stream.save(file)
        user.check("task/clear", stream.clear)
        user.check("task/open", lambda: stream.resume(file))
        user.check("task/clear", stream.clear)
        stream.join_group()
        user.check("put/put", lambda: stream.resume(file))
        assert stream.stats().ledger.waiting == 2
        assert stream.stats().ledger.balanced


def test_weights(user):
    publisher = redrb.WeightPublisher(user.client, "policy", namespace=user.namespace)
    state = {"a": torch.arange(8.0)}
    publisher.publish(state)
    for script in ("weights/begin", "weights/prepare", "weights/commit"):
        before = user.content()
        for command in sorted(needed_commands(script)):
            user.lose(command)
            with pytest.raises(StoreDenied):
                publisher.publish({"a": state["a"] + 1})
        user.give_all()
        # an attempt that was prepared is deleted by the next one
        left = re.compile(b".*:(chunk:.*|delta:.*|attempts|trash)")
        assert {key for key in user.content() if not left.fullmatch(key)} <= before.keys()
    reader = redrb.WeightSubscriber(user.client, "policy", namespace=user.namespace)
    target = {"a": torch.zeros(8)}
    assert user.check("weights/pin", lambda: reader.poll(target))
    assert torch.equal(target["a"], state["a"])
    publisher.publish({"a": state["a"] + 1})
    assert reader.poll(target)
    user.check(
        "weights/remove",
        lambda: remove_weights(user.client, "policy", namespace=user.namespace),
    )


def test_a_user_who_may_not_take_leaves_the_groups_and_closes_without_an_error(user):
    with ExperienceStream(user.owner, "math", namespace=user.namespace) as owner:
        owner.join_group()
        owner.put(numbered(1))
        with ExperienceStream(user.client, "math", namespace=user.namespace) as stream:
            user.lose("xclaim")
            with pytest.raises(StoreDenied, match=r"may not run XCLAIM.*nothing was changed"):
                stream.take(1, timeout=0)
        ledger = owner.stats().ledger
        assert (ledger.waiting, ledger.leased, ledger.balanced) == (1, 0, True)
        user.give_all()
        with ExperienceStream(user.client, "math", namespace=user.namespace) as stream:
            stream.take(1, timeout=0).ack()
        assert owner.stats().ledger.acked == 1


def test_a_check_of_rights_gives_each_command_as_many_words_as_it_needs(real_url):
    """Redis 8.2.9, and older versions with the same fix, refuse to check fewer."""
    names = needed_commands_of_all_scripts()
    with redrb.connect(real_url) as client:
        reply = client.execute("COMMAND", "INFO", *names)
    for name, info in zip(names, reply, strict=True):
        listed = as_lua(frozenset([name]))[0]
        assert f"words = {abs(info[1])}" in listed or name == "zrank", f"{name}: {info[1]}"


def needed_commands_of_all_scripts() -> list[str]:
    return sorted(frozenset().union(*map(needed_commands, script_names().values())))


def test_an_error_names_the_key_that_was_refused(user):
    put(user.owner, namespace=user.namespace)
    publish(user.owner, namespace=user.namespace)
    prefix = f"redrb:{{{user.namespace}:"
    keys = [each.decode() for each in user.owner.execute("KEYS", f"{prefix}*")]
    uses: dict[str, Callable[..., object]] = {
        "math}:stream": put,
        "math}:task": settings,
        "weights:policy}:versions": poll,
        "weights:policy}:chunk:1:0": poll,  # is read by GET, beside redis-py
        "weights:policy}:chunk:2:0": publish,  # is written by SET, in the same way
        "maker:m}:announcements": follow,
    }
    for key, use in uses.items():
        others = [f"~{each}" for each in keys if not each.endswith(key)]
        if "chunk" in key:
            others.append(f"~{prefix}weights:policy}}:[^c]*")
        user.owner.execute("ACL", "SETUSER", user.name, "resetkeys", *others, "+@all")
        with pytest.raises(StoreDenied) as denied:
            use(user.client, namespace=user.namespace)
        assert re.search(rf"in the request \w+ .*{re.escape(prefix + key)}", str(denied.value))


def put(client: Client, *, namespace: str) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put(numbered(1))


def settings(client: Client, *, namespace: str) -> None:
    read_settings(TaskStore.of(client, namespace, "math"))


def poll(client: Client, *, namespace: str) -> None:
    subscriber = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    subscriber.poll({"a": torch.zeros(8)})


def publish(client: Client, *, namespace: str) -> None:
    publisher = redrb.WeightPublisher(client, "policy", namespace=namespace)
    publisher.publish({"a": torch.arange(8.0)})


def follow(client: Client, *, namespace: str) -> None:
    AnnouncementReader(client, maker_key(namespace, "m")).newest(0.1)
