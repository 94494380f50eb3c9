"""No script call takes long with 1,000,000 groups and 10,000 waiters, by the server's slow log."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median

import msgpack
import pytest

import redrb
from redrb.connection import Client
from redrb.connection.client import scan
from redrb.experience import Status
from redrb.keys import TaskKeys
from redrb.lua.scripts import assemble, load
from redrb.stream.put.calls import MOST_EVICTED, AskRoom, Evict
from redrb.stream.saving.calls import ReadRecords
from redrb.stream.take.calls import Beat, Leave
from redrb.stream.task.calls import (
    Clear,
    Count,
    Discard,
    DropGroup,
    Expire,
    Join,
    Move,
    Settle,
    Stats,
    Versions,
)
from redrb.stream.task.description import StalenessRules
from redrb.stream.task.expiration import EXPIRE_GROUPS
from tests.samples import numbered
from tests.scenes import FOREVER_MS, Scene, groups_of, run_script, script_names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS, WAITERS, PART = 1_000_000, 10_000, 1000
SHARED, OTHERS = 2000, [f"other{number}" for number in range(7)]
"""The first groups wait for seven more consumer groups, which have acknowledged all others."""
MOST_US = 3000
"""Of the median call of a script: 2 ms, and half as much again on a busy machine."""

COMMON = json.dumps({"tag": "score", "inverted": False, "values": [[0.25, 0.75]]})
RARE = json.dumps({"tag": "score", "inverted": False, "values": [[7, 7]]})
NONE = json.dumps({"tag": "score", "inverted": False, "values": [[8, 8]]})

FILL = """
--@include task facts pools capacity
local count, version, payload = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local last, members, all = number(puts, 'last'), {}, {}
for i = 1, count do
  members[i] = member_of(last + i)
  all[i] = {size = #payload, samples = 1, status = 'completed', score = version, version = version}
  all[i].tags = {score = 0.5}
  redis.call('XADD', stream, id_of(last + i), 'g', payload)
  store_facts(members[i], all[i])
end
for _, group in ipairs(ARGV[4] == 'shared' and groups() or {'default'}) do
  enter(group, group, members, all)
end
redis.call('HSET', puts, 'last', last + count)
for name, amount in pairs({put = count, samples_put = count, bytes_put = count * #payload}) do
  add(puts, name, amount)
end
"""
"""What put/put.lua does, without a client: 1,000,000 puts would take minutes."""


@pytest.fixture
def scene(real_url, namespace, no_heartbeats):
    with redrb.connect(real_url) as client:
        client.execute("CONFIG", "SET", "slowlog-max-len", 20_000)
        settings = {"order": "stalest", "tags": ["score"], "max_staleness": 50}
        yield Scene(client, namespace, GROUPS, settings)


def test_no_script_takes_long(scene):
    stream, client = scene.stream, scene.client
    for name in OTHERS:
        scene.run(Join(name))
    _fill(scene)
    named = list(map(str, stream.put(groups_of(50), policy_version=90, tags={"score": 7})))
    late = scene.open(group="late")
    while scene.run(Join("late")).more:
        pass
    for number in range(WAITERS // 2):
        scene.take(f"w{number}", 3, ttl_ms=FOREVER_MS, status="aborted")
        scene.take(f"q{number}", 3, ttl_ms=FOREVER_MS, where=NONE)
    full = scene.open(limit=GROUPS)
    dropping = scene.open(on_full="drop_oldest")
    for number in range(WAITERS):
        scene.run(AskRoom(f"p{number}", FOREVER_MS, [100]))
    for name in script_names().values():  # else the first call of a script is logged as EVAL
        client.execute("SCRIPT", "LOAD", load(name).text)
    _log(client, 0)
    for turn in range(5):
        lease = stream.take(16, timeout=0)
        scene.run(AskRoom(f"p{turn}", FOREVER_MS, [100]))
        scene.run(AskRoom(f"new{turn}", FOREVER_MS, [100]))
        lease.ack(lease.ids[:4])
        lease.reject("bad", lease.ids[:2])
        lease.release()
        for where in (RARE, COMMON, NONE):
            scene.take("a", 4, where=where)
        scene.take("w7", 3, ttl_ms=FOREVER_MS, status="aborted")
        scene.run(Beat("default", "a", FOREVER_MS, scene.incarnation), b"")
        scene.run(Stats("default"))
        scene.run(Count("default", Status.COMPLETED))
        scene.run(Count("default", Status.COMPLETED, COMMON))
        scene.run(Count("nobody", Status.COMPLETED, COMMON))
        scene.run(Versions("default"))
        scene.run(Move("default", Status.FAILED, named[turn * 4 : turn * 4 + 4]))
        scene.run(Settle("default", scene.incarnation, [(seq, 1) for seq in named[-8:]]))
        scene.run(Discard("default", [named[20 + turn]]))
        for mode in ("discard", "keep"):
            rules = StalenessRules(98, None)
            scene.run(Expire("default", EXPIRE_GROUPS, mode, 100, rules, [Status.COMPLETED]))
        scene.run(ReadRecords(["default"], list(map(str, range(500_000, 500_032)))))
        for count in (1, 32):
            scene.run(Evict(f"e{count}.{turn}", 1, 0, count, 3000, 0, MOST_EVICTED))
        scene.run(DropGroup("late"))
        scene.run(Join(f"new{turn}"))
        scene.run(Join(f"new{turn}"))
        scene.run(Leave("default", f"w{turn}"))
    full.close()
    for _ in range(5):
        dropping.put(numbered(1), policy_version=95, tags={"score": 0.5})
    dropping.close()
    late.close()
    for number in range(4):
        _clear_a_copy(scene, f"copy{number}")
    stream.clear()
    times = _log(client, 10_000)
    for name, spent in sorted(times.items()):
        print(f"{name:24} {len(spent):4} calls, median {median(spent):6.0f} us, most {max(spent)}")
    slow = {name: median(spent) for name, spent in times.items() if median(spent) > MOST_US}
    assert not slow, f"microseconds of the median call: {slow}"
    assert len(times) >= 18
    assert len(times["put/evict of 1"]) >= 5
    assert len(times["put/evict of 32"]) == 5


def _fill(scene: Scene) -> None:
    stream = scene.stream._task.store.keys.stream
    scene.stream.put(numbered(1), policy_version=1, tags={"score": 0.5})
    (_, (_, payload)), *_ = scene.client.execute("XRANGE", stream, "-", "+")
    script = assemble("test", FILL)
    for start in range(0, GROUPS, PART):
        version = 1 + start // PART % 40
        shared = "shared" if start < SHARED else ""
        run_script(scene.client, script, [stream], [PART, version, payload, shared])


def _clear_a_copy(scene: Scene, task: str) -> None:
    """Clear a task with the same groups and waiters."""
    client, keys = scene.client, scene.stream._task.store.keys
    copy = TaskKeys.of(scene.namespace, task)
    for key in scan(client, f"{keys.prefix}*"):
        client.execute("COPY", key, key.decode().replace(keys.prefix, copy.prefix))
    incarnation = client.execute("HGET", copy.task, "incarnation")
    Clear("who", 1000).run(client, [copy.stream], incarnation)


def _log(client: Client, threshold_us: int) -> dict[str, list[int]]:
    """Return the times of all scripts since the last call, and log from so many us on.

    Evictions are listed by the number of groups of their put.
    """
    by_sha = script_names()
    times: dict[str, list[int]] = defaultdict(list)
    for _, _, spent, (command, *arguments), *_ in client.execute("SLOWLOG", "GET", -1):
        if command.upper() == b"EVALSHA" and arguments[0].decode() in by_sha:
            name = by_sha[arguments[0].decode()]
            if name == "put/evict":
                name += f" of {msgpack.unpackb(arguments[3])['groups']}"
            times[name].append(spent)
    client.execute("SLOWLOG", "RESET")
    client.execute("CONFIG", "SET", "slowlog-log-slower-than", threshold_us)
    return times
