"""Trials of pages of `redrb doctor`: all is found, whatever its number, and repaired."""

from __future__ import annotations

from collections.abc import Sequence

from redrb import ExperienceStream
from redrb.errors import StoreError
from redrb.registry import Registry
from redrb.stream.task.store import TaskStore
from redrb.watch.doctor import registry_names, repairs
from redrb.watch.doctor.checkup import Checkup
from redrb.watch.doctor.examination import Examination, examine
from redrb.watch.doctor.registry_names import left_names, remove_name
from redrb.watch.state.model import State
from redrb.watch.state.reader import StateReader
from tests.audit import kill_consumer
from tests.page_trials.bench import Bench, is_acknowledged, train
from tests.page_trials.waiting import RIGHTS, admit
from tests.samples import numbers


def consumer_groups_examined(bench: Bench, count: int) -> None:
    """Every consumer group is examined, each with its own figures."""
    stream = bench.filled(2)
    for number in range(count - 1):
        bench.open(group=f"g{number}").join_group()
    held = stream.take(1, timeout=0)
    found = _examined(bench)
    assert found.groups == count
    assert {group.name: group.waiting for group in found.consumer_groups} == {
        stream.group: 1,
        **{f"g{number}": 2 for number in range(count - 1)},
    }
    held.ack()


def waiters_examined(bench: Bench, count: int) -> None:
    """Of takes that look no more, a page is counted."""
    bench.filled(0)
    for number in range(count):
        bench.queue(f"w{number}")
    for number in range(count):
        bench.client.execute("HSET", bench.key("needs", "default"), f"w{number}", "1 1 0")
    [group] = _examined(bench).consumer_groups
    assert group.stuck_takes == min(count, 3)


def dead_consumers_repaired(bench: Bench, count: int) -> None:
    """Every dead consumer is named with its leases, and all of these wait again."""
    stream = bench.filled(count)
    dead = [bench.open() for _ in range(count)]
    for each in dead:
        each.take(1, timeout=0)
    for each in dead:
        kill_consumer(each)
    [group] = _examined(bench).consumer_groups
    assert group.dead == {each.consumer: 1 for each in dead}
    assert _repaired(bench) == ["dead-consumer"]
    [group] = _examined(bench).consumer_groups
    assert group.dead == {}
    train(stream, list(range(count)))


def dead_makers_repaired(bench: Bench, count: int) -> None:
    """The rights of every dead maker are counted, and all of them return."""
    stream = bench.filled(0, **RIGHTS)
    for number in range(count):
        admit(bench, stream, f"maker-{number}", 2)
    for number in range(count):
        bench.client.execute("ZADD", bench.key("makers"), "XX", 1, f"maker-{number}")
    assert _examined(bench).lost_rights == 2 * count
    assert _repaired(bench) == ["lost-rights"]
    assert (_examined(bench).lost_rights, bench.size("rights")) == (0, 0)


def late_rights_repaired(bench: Bench, count: int) -> None:
    """Every right that is held for too long is counted, and all of them return."""
    stream = bench.filled(0, **RIGHTS)
    admit(bench, stream, "slow", count)
    for right in range(1, count + 1):
        bench.client.execute("ZADD", bench.key("holds"), "XX", 1, right)
    assert _examined(bench).lost_rights == count
    assert _repaired(bench) == ["lost-rights"]
    assert (_examined(bench).lost_rights, bench.size("rights")) == (0, 0)


def many_unknown(bench: Bench, count: int) -> None:
    """`redrb doctor` finds the leases of many consumers that the task does not know."""
    stream = bench.filled(count)
    unknown = [bench.open() for _ in range(count)]
    for each in unknown:
        each.take(1, timeout=0)
    _forget(bench, unknown)
    assert _repaired(bench) == ["lease-without-consumer"]
    train(stream, list(range(count)))


def lost_behind_living(bench: Bench, count: int) -> None:
    """It finds leases of an unknown consumer behind those of a living one."""
    stream, unknown = bench.filled(2 * count), bench.open()
    living = stream.take(count, timeout=0)
    lost = [unknown.take(1, timeout=0) for _ in range(count - 2)]
    lost.append(unknown.take(2, timeout=0))
    _forget(bench, [unknown])
    assert _repaired(bench) == ["lease-without-consumer"]
    lease = stream.take(count, timeout=0)
    assert sorted(numbers(lease)) == list(range(count, 2 * count))
    assert not any(map(is_acknowledged, lost))
    lease.ack()
    living.ack()


def names_left(bench: Bench, count: int) -> None:
    """Names without a task are found behind those of tasks that live, and removed."""
    registry = Registry(bench.client, bench.namespace)
    for number in range(count):
        ExperienceStream(bench.client, f"a{number}", namespace=bench.namespace).close()
        registry.add("task", f"z{number}")
    runs = 0
    state = State(bench.namespace, bench.client.where, 0.0)
    while left := left_names(bench.client, state):
        assert all(remove_name(bench.client, bench.namespace, name)[1] for name in left)
        runs += 1
    assert runs == -(-count // registry_names.MOST_NAMES)
    assert list(registry.names("task")) == sorted(f"a{number}" for number in range(count))


def tasks_unread(bench: Bench, count: int) -> None:
    """Where the state cannot be read, a page of the tasks is examined, and the rest is counted."""
    for number in range(count):
        ExperienceStream(bench.client, f"a{number}", namespace=bench.namespace).close()

    def fails() -> State:
        raise StoreError("damaged")

    state = Checkup(bench.client, bench.namespace, fails).state
    assert (len(state.tasks), state.tasks_total) == (min(count, 3), count)


def _forget(bench: Bench, unknown: Sequence[ExperienceStream]) -> None:
    """Let the task forget consumers, as after the loss of a key."""
    for each in unknown:
        kill_consumer(each)
        bench.client.execute("ZREM", bench.key("consumers", "default"), each.consumer)


def _examined(bench: Bench) -> Examination:
    found = examine(TaskStore.of(bench.client, bench.namespace, "math"))
    assert found is not None
    return found


def _repaired(bench: Bench) -> list[str]:
    """Repair what is found; returns the codes of the repairs, all of which are done."""
    bench.patch.setattr(repairs, "TWO_HEARTBEATS_S", 0.0)
    state = StateReader(bench.client, bench.namespace).look()
    done = list(repairs.repair(bench.client, state, [_examined(bench)], []))
    assert all(each.done for each in done)
    return [each.code for each in done]
