"""Users of Redis with the rights that `redrb acl` prints: what each role can and cannot do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import redrb
from redrb import ExperienceStream, ShardedStream, Stage
from redrb.cli.__main__ import main
from redrb.cli.arguments import ROLES
from redrb.cli.roles import permissions
from redrb.connection import Client
from redrb.errors import (
    BatchTimeout,
    ConfigError,
    RedrbError,
    StoreDenied,
    StoreError,
    WeightCorrupt,
    WeightTimeout,
)
from redrb.keys import TaskKeys, reference_weights, registry_key, trainer_key
from redrb.registry import Registry
from redrb.stream.task.lookup import task_stats
from redrb.watch.groups import Follower
from redrb.watch.state.reader import StateReader
from redrb.weights.inspection.listing import remove_weights, versions_of
from redrb.weights.reading import missing
from redrb.weights.reading.catalogue import Pin
from tests.integration.conftest import SECRET, LogIn, Run
from tests.samples import numbered, numbers
from tests.scenes import silence

WEIGHTS = {"a": torch.arange(8.0)}
TASK = "math"

FORBIDDEN = (
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "maxmemory"),
    ("CONFIG", "SET", "maxmemory", "0"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("SHUTDOWN", "NOSAVE"),
    ("SCRIPT", "FLUSH"),
    ("GET", "redrb:{other:math}:task"),
    ("EVAL", "return redis.call('GET', 'secret')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
)


@pytest.fixture
def owner(real_url: str, no_heartbeats: None) -> Iterator[Client]:
    """A client with all rights."""
    with redrb.connect(real_url) as client:
        yield client


def publish(client: Client, namespace: str, step: float = 0.0) -> None:
    """Publish weights as their trainer."""
    publisher = redrb.WeightPublisher(client, "policy", namespace=namespace)
    publisher.publish({"a": WEIGHTS["a"] + step})


def content(owner: Client, namespace: str) -> dict[bytes, object]:
    """Return all keys of a namespace, with their values."""

    def value(key: bytes) -> object:
        if owner.execute("TYPE", key) != b"hash":
            return owner.execute("DUMP", key)
        found = owner.execute("HGETALL", key)  # whose dump has another order after a read
        return sorted(zip(found[::2], found[1::2], strict=True))

    keys: list[bytes] = owner.execute("KEYS", f"redrb:{{{namespace}:*")
    return {key: value(key) for key in keys}


@pytest.mark.parametrize("role", ROLES)
def test_no_role_reaches_other_keys_or_the_server(
    log_in: LogIn, owner: Client, namespace: str, role: str
) -> None:
    with ExperienceStream(owner, "secret", namespace=namespace) as stream:
        stream.put(numbered(1))
    client = log_in(role)
    for command in FORBIDDEN:
        if (role, *command) == ("admin", "SCAN", "0"):
            continue  # `redrb weights rm` searches for chunks that no version has
        with pytest.raises(StoreDenied):
            client.execute(*command)
    for task, place in (("secret", namespace), (TASK, "other")):
        with pytest.raises(StoreDenied):
            ExperienceStream(client, task, namespace=place).put(numbered(2))
        with pytest.raises(StoreDenied):
            task_stats(client, task, namespace=place, group="default")
    with pytest.raises(StoreDenied):
        redrb.WeightSubscriber(client, "others", namespace=namespace).poll({"a": torch.zeros(8)})


def test_a_maker_puts_and_reads_weights(log_in: LogIn, owner: Client, namespace: str) -> None:
    client = log_in("maker")
    options = {"namespace": namespace, "limit": 2, "tags": {"site": str}, "max_staleness": 4}
    with ExperienceStream(client, TASK, weights="policy", **options) as stream:
        stream.put(numbered(1), policy_version=0, tags={"site": "a"})
        with stream.writer() as writer:
            writer.put(numbered(2), policy_version=0, tags={"site": "b"})
        with ExperienceStream(owner, TASK, namespace=namespace) as trainer:
            threading.Timer(0.3, lambda: trainer.take(2, timeout=5).ack()).start()
            stream.put(numbered(3), policy_version=0, tags={"site": "a"}, timeout=10)
        assert stream.stats().ledger.put == 3
    publish(owner, namespace)
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    target = {"a": torch.zeros(8)}
    assert reader.poll(target)
    assert torch.equal(target["a"], WEIGHTS["a"])
    owner.execute("DEL", f"redrb:{{{namespace}:weights:policy}}:chunk:1:0")
    with pytest.raises(WeightCorrupt, match="next version is a full one"):
        reader.fetch()


def test_a_stage_forwards_and_reaches_no_third_task(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    with ExperienceStream(owner, TASK, namespace=namespace) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
    client = log_in("trainer", "--to", "scored")
    with (
        ExperienceStream(client, TASK, namespace=namespace) as source,
        ExperienceStream(client, "scored", namespace=namespace) as target,
    ):
        Stage(source, target, lambda group: group, batch=1).run(batches=2)
        with pytest.raises(StoreDenied):
            target.take(1, timeout=0)
    with ExperienceStream(owner, "scored", namespace=namespace) as scored:
        assert numbers(scored.take(2, timeout=0)) == [1, 2]
    with pytest.raises(StoreDenied):
        ExperienceStream(client, "ready", namespace=namespace)


def test_roles_include_the_weights_that_belong_to_theirs_and_no_others(
    log_in: LogIn, namespace: str
) -> None:
    trainer, maker, observer = map(log_in, ("trainer", "maker", "observer"))
    for name in ("policy", reference_weights("policy")):
        redrb.WeightPublisher(trainer, name, namespace=namespace).publish(WEIGHTS)
        assert redrb.WeightSubscriber(maker, name, namespace=namespace).poll({"a": torch.ones(8)})
        assert [each.version for each in versions_of(observer, name, namespace)] == [1]
        with pytest.raises(StoreDenied):
            redrb.WeightPublisher(maker, name, namespace=namespace).publish(WEIGHTS)
    with pytest.raises(StoreDenied):
        redrb.WeightPublisher(trainer, "policy2", namespace=namespace).publish(WEIGHTS)


def test_a_maker_publishes_no_weights(log_in: LogIn, owner: Client, namespace: str) -> None:
    publish(owner, namespace)
    client = log_in("maker")
    before = content(owner, namespace)
    with pytest.raises(StoreDenied):
        publish(client, namespace, 1.0)
    with pytest.raises(StoreDenied):
        remove_weights(client, "policy", namespace=namespace)
    prefix = f"redrb:{{{namespace}:weights:policy}}:"
    for command in (("XADD", f"{prefix}versions", "*", "a", "b"), ("DEL", f"{prefix}fence")):
        with pytest.raises(StoreDenied):
            client.execute(*command)
    assert content(owner, namespace) == before


@pytest.mark.parametrize("host_cache", [False, True])
def test_a_weight_reader_fetches_each_kind_of_version(
    log_in: LogIn, owner: Client, namespace: str, host_cache: bool
) -> None:
    client = log_in("weight-reader")
    publisher = redrb.WeightPublisher(owner, "policy", namespace=namespace)
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace, host_cache=host_cache)
    state, target = {"a": torch.arange(1e5)}, {"a": torch.zeros(100_000)}
    assert publisher.publish(state).kind == "full"
    with reader.standby(target) as standby:
        assert standby.wait(timeout=10) == 1
    first = state["a"].clone()
    assert torch.equal(target["a"], first)
    state["a"][7] = -1
    assert publisher.publish(state).kind == "delta"
    assert reader.poll(target)
    assert torch.equal(target["a"], state["a"])
    assert [each.version for each in reader.versions()] == [1, 2]
    assert torch.equal(reader.fetch(1)["a"], first)
    pair = {"a.lora_A": torch.ones(2, 8), "a.lora_B": torch.ones(8, 2)}
    settings = {"a": redrb.weights.LoraConfig(r=2, lora_alpha=4.0)}
    publisher.publish_lora((pair, settings))
    assert torch.equal(reader.adapter().tensors["a.lora_A"], pair["a.lora_A"])
    with Pin(reader._catalogue) as pin:
        assert [each.how for each in pin.route(have=0, wanted=2)] == ["full", "delta"]
        pin._renew(1000)
        pins = owner.execute("HLEN", f"redrb:{{{namespace}:weights:policy}}:pins")
        assert pins >= 1
    threading.Timer(0.3, lambda: publisher.publish({"a": state["a"] + 1})).start()
    assert reader.wait(newer_than=3, timeout=10).version == 4
    for kind in ("chunk", "delta"):
        owner.execute("DEL", f"redrb:{{{namespace}:weights:policy}}:{kind}:4:0")
    with pytest.raises(WeightCorrupt, match="next version is a full one"):
        reader.fetch(4)


@pytest.mark.parametrize("role", ["maker", "episode-maker", "weight-reader", "trainer", "admin"])
def test_a_key_of_weights_that_another_program_has_written_is_named_to_each_role(
    log_in: LogIn, owner: Client, namespace: str, role: str
) -> None:
    client = log_in(role)
    pins, fence = (f"redrb:{{{namespace}:weights:policy}}:{name}" for name in ("pins", "fence"))
    publish(owner, namespace)
    owner.execute("SET", pins, "x")
    with pytest.raises(StoreError, match=f"{pins} holds a string and not a hash"):
        redrb.WeightSubscriber(client, "policy", namespace=namespace).fetch()
    if role in ("trainer", "admin"):
        owner.execute("SET", fence, "x")
        with pytest.raises(StoreError, match=f"{fence} holds a string and not a hash"):
            publish(client, namespace)


def test_a_weight_reader_reaches_nothing_but_its_weights(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    publish(owner, namespace)
    redrb.WeightPublisher(owner, reference_weights("policy"), namespace=namespace).publish(WEIGHTS)
    with ExperienceStream(owner, TASK, namespace=namespace) as stream:
        stream.put(numbered(1))
    before = content(owner, namespace)
    client = log_in("weight-reader")
    for action in (
        lambda: publish(client, namespace, 1.0),
        lambda: remove_weights(client, "policy", namespace=namespace),
        lambda: ExperienceStream(client, TASK, namespace=namespace),
        lambda: ExperienceStream(client, "new", namespace=namespace, weights="policy"),
        lambda: task_stats(client, TASK, namespace=namespace, group="default"),
    ):
        with pytest.raises(StoreDenied):
            action()
    prefix = f"redrb:{{{namespace}:weights:policy}}:"
    for command in (
        ("XADD", f"{prefix}versions", "*", "a", "b"),
        ("DEL", f"{prefix}fence"),
        ("XRANGE", trainer_key(namespace, "policy"), "-", "+"),
        ("ZRANGEBYLEX", registry_key(namespace), "-", "+"),
    ):
        with pytest.raises(StoreDenied):
            client.execute(*command)
    for name, place in (("policy", "other"), (reference_weights("policy"), namespace)):
        with pytest.raises(StoreDenied):
            redrb.WeightSubscriber(client, name, namespace=place).fetch()
    assert content(owner, namespace) == before


@pytest.mark.parametrize(
    ("tasks", "weights", "to", "tables"),
    [
        ((), None, None, ()),
        ((TASK,), "policy", None, ()),
        ((), "policy", TASK, ()),
        ((), "policy", None, ("train",)),
    ],
)
def test_a_weight_reader_has_weights_and_nothing_else(
    tasks: tuple[str, ...], weights: str | None, to: str | None, tables: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="give --weights, and no task or table"):
        permissions("weight-reader", tasks, "default", weights, to, tables)


def test_a_maker_takes_nothing(log_in: LogIn, namespace: str) -> None:
    with ExperienceStream(log_in("maker"), TASK, namespace=namespace) as stream:
        stream.put(numbered(1))
        with pytest.raises(StoreDenied):
            stream.take(1, timeout=0)


def test_a_gateway_takes_nothing_and_publishes_no_weights(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    publish(owner, namespace)
    client = log_in("gateway")
    with ExperienceStream(client, TASK, namespace=namespace, weights="policy") as stream:
        stream.put(numbered(1), policy_version=0)
        for refused in (
            lambda: stream.take(1, timeout=0),
            stream.clear,
            lambda: publish(client, namespace, 1.0),
            lambda: remove_weights(client, "policy", namespace=namespace),
        ):
            with pytest.raises(StoreDenied):
                refused()
    reader = redrb.WeightSubscriber(client, "policy", namespace=namespace)
    assert reader.poll({"a": torch.zeros(8)})


def test_a_trainer_takes_acknowledges_and_publishes(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    client = log_in("trainer")
    with (
        ExperienceStream(owner, TASK, namespace=namespace, weights="policy") as maker,
        ExperienceStream(client, TASK, namespace=namespace) as stream,
    ):
        with pytest.raises(BatchTimeout, match="Nobody has ever put") as caught:
            stream.take(1, timeout=0)
        assert caught.value.similar == ()  # it may not read the registry
        for command in (("ZREM", "task:math"), ("ZRANGE", 0, -1), ("DEL",)):
            with pytest.raises(StoreDenied):
                client.execute(command[0], registry_key(namespace), *command[1:])
        maker.put_many([[numbered(n)] for n in range(1, 7)])
        lease = stream.take(2, timeout=0)
        assert numbers(lease) == [1, 2]
        lease = stream.take(2, timeout=0, ack=lease)
        lease.release()
        stream.take(1, timeout=0).reject("broken")
        threading.Timer(0.3, lambda: maker.put_many([[numbered(n)] for n in (7, 8)])).start()
        stream.take(5, timeout=10).ack()
        publish(client, namespace)
        publish(client, namespace, 1.0)
        assert maker.stats().version == 2
        ledger = stream.stats().ledger
        assert (ledger.acked, ledger.dead, ledger.waiting, ledger.balanced) == (7, 1, 0, True)


def test_a_trainer_puts_a_group_whose_maker_died(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    with (
        ExperienceStream(log_in("maker"), TASK, namespace=namespace) as maker,
        ExperienceStream(log_in("trainer"), TASK, namespace=namespace) as trainer,
    ):
        maker.put_part("old", numbered(1), index=0, of=2, least=1)
        maker.put_part("few", numbered(1), index=0, of=2, on_incomplete="dead")
        due = TaskKeys.of(namespace, TASK).prefix + "part_due"
        owner.execute("ZADD", due, "XX", 1, "old", 2, "few")
        trainer.join_group()
        trainer._consumer.beat()
        trainer._consumer.beat()
        parts = maker.stats().parts
        assert (parts.delivered, parts.dead, parts.groups) == (1, 1, 0)
        assert numbers(trainer.take(1, timeout=0)) == [1]


def test_roles_work_on_their_task_and_on_no_other(
    log_in: LogIn, owner: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = {role: log_in(role) for role in ("maker", "trainer", "observer")}
    options = {"namespace": namespace, "limit": 6}
    with ExperienceStream(owner, "secret", **options) as other:
        other.put(numbered(0))
    for client in clients.values():
        with pytest.raises(StoreDenied):
            task_stats(client, "secret", namespace=namespace, group="default")
        with pytest.raises(StoreDenied):
            client.execute("HGET", TaskKeys.of(namespace, "secret").task, "put")
    with (
        ExperienceStream(clients["maker"], TASK, **options) as maker,
        ExperienceStream(clients["trainer"], TASK, **options) as trainer,
        ThreadPoolExecutor(1) as threads,
    ):
        taking = threads.submit(trainer.take, 6, timeout=20)
        maker.put_many([[numbered(number)] for number in range(5)])
        while not trainer.stats().consumers_waiting:
            pass
        maker.put(numbered(5))
        lease = taking.result()
        putting = threads.submit(maker.put, numbered(6), timeout=20)
        while not trainer.stats().producers_waiting:
            pass
        lease.ack()
        putting.result()
        monkeypatch.setenv("REDRB_URL", clients["observer"].url)
        assert main(["stats", TASK, "--namespace", namespace]) == 0
        ledger = trainer.stats().ledger
        assert (ledger.put, ledger.acked, ledger.waiting) == (7, 6, 1)


def test_one_name_gives_a_role_all_shards_of_a_stream_and_no_other_task(
    log_in: LogIn, owner: Client, namespace: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"tasks": ("math@*",)}
    clients = {role: log_in(role, **names) for role in ("maker", "trainer", "observer", "admin")}
    ExperienceStream(owner, TASK, namespace=namespace).close()
    for client in clients.values():
        with pytest.raises(StoreDenied):
            client.execute("HGET", TaskKeys.of(namespace, TASK).task, "put")
    options = {"shards": 13, "namespace": namespace, "limit": 1}
    with (
        ShardedStream(clients["maker"], TASK, **options) as maker,
        ShardedStream(clients["trainer"], TASK, **options) as trainer,
        ThreadPoolExecutor(1) as threads,
    ):
        taking = threads.submit(trainer.take, 13, timeout=20)
        maker.put_many([[numbered(number)] for number in range(12)], timeout=20)
        while not trainer.stats().consumers_waiting:
            pass
        maker.put(numbered(12))
        lease = taking.result()
        putting = threads.submit(maker.put, numbered(13), timeout=20)
        while not trainer.stats().producers_waiting:
            pass
        lease.ack()
        putting.result()
        for role, words in (("observer", "stats"), ("observer", "ls"), ("admin", "rm")):
            monkeypatch.setenv("REDRB_URL", clients[role].url)
            subject = {"stats": ["math@*"], "ls": [], "rm": ["math@12", "--yes", "--force"]}[words]
            assert run(words, *subject)[0] == 0
        with pytest.raises(StoreDenied):
            ShardedStream(clients["observer"], TASK, **options).put(numbered(1))


def test_an_observer_sees_all_and_changes_nothing(
    log_in: LogIn,
    owner: Client,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(owner, namespace)
    with ExperienceStream(owner, TASK, namespace=namespace, weights="policy") as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        lease = stream.take(1, timeout=0)
        client = log_in("observer")
        monkeypatch.setenv("REDRB_URL", client.url)
        ExperienceStream(owner, "secret", namespace=namespace).close()
        redrb.WeightPublisher(owner, "secret", namespace=namespace)
        follower = Follower(client, TASK, namespace=namespace)
        stream.put(numbered(3))
        while not follower.next(1.0).groups:
            pass
        silence(stream)  # from here on nobody but the observer could change a key
        before = content(owner, namespace)
        assert main(["stats", TASK, "--namespace", namespace]) == 0
        assert main(["ls", "--namespace", namespace]) == 0
        inspected = (["--full"], ["--status", "leased"], ["--best", "1"], ["1"], ["--dead"])
        for words in inspected:
            assert main(["inspect", TASK, *words, "--namespace", namespace]) == 0
        for subject in ([TASK], []):
            capsys.readouterr()
            doctor = ["doctor", *subject, "--namespace", namespace, "--over", "0.01", "--json"]
            assert main(doctor) == 0
            report = json.loads(capsys.readouterr().out)
            found = {finding["code"]: finding["summary"] for finding in report["findings"]}
            assert found["unchecked"] == ("Not checked: settings (CONFIG GET), users (ACL USERS).")
            assert ("unreadable-task" in found) == (not subject)
        assert content(owner, namespace) == before
        owner.execute("XADD", f"redrb:{{{namespace}:{TASK}}}:stream", "9999999999999-*", "g", b"x")
        Registry(owner, namespace).add("task", "gone")
        before = content(owner, namespace)
        doctor = ["doctor", TASK, "--repair", "--namespace", namespace, "--over", "0.01", "--json"]
        assert main(doctor) == 0
        (repair,) = json.loads(capsys.readouterr().out)["repairs"]
        assert (repair["code"], repair["done"]) == ("orphaned-entries", False)
        prefix = f"redrb:{{{namespace}:{TASK}}}:"
        for command in (
            ("DEL", f"{prefix}stream"),
            ("XADD", f"{prefix}stream", "*", "g", "x"),
            ("HSET", f"{prefix}task", "limit", "1"),
            ("EVAL", "return redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)", "1", f"{prefix}stream"),
            ("EVAL", "return redis.call('UNLINK', KEYS[1])", "1", f"{prefix}stream"),
        ):
            with pytest.raises(StoreDenied):
                client.execute(*command)
        assert content(owner, namespace) == before
        lease.ack()


def test_an_observer_of_a_namespace_sees_all_of_it_and_no_other(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    publish(owner, namespace)
    ExperienceStream(owner, "other", namespace=f"{namespace}2").close()
    with ExperienceStream(owner, TASK, namespace=namespace) as stream:
        stream.put(numbered(1))
        one, all_of_it = log_in("observer"), log_in("observer", tasks=())
        ExperienceStream(owner, "secret", namespace=namespace).close()
        before = content(owner, namespace)
        assert [task.readable for task in StateReader(one, namespace).look().tasks] == [True, False]
        state = StateReader(all_of_it, namespace).look()
        assert [task.name for task in state.tasks if task.readable] == [TASK, "secret"]
        assert state.tasks[0].groups[0].stats.stored == 1
        assert [weights.version for weights in state.weights] == [1]
        with pytest.raises(ConfigError, match="there are policy"):
            versions_of(all_of_it, "polisy", namespace)
        with pytest.raises(StoreDenied):
            StateReader(all_of_it, f"{namespace}2").look()
        with pytest.raises(StoreDenied):
            all_of_it.execute("HSET", f"redrb:{{{namespace}:{TASK}}}:task", "limit", "1")
        assert content(owner, namespace) == before


def test_an_admin_saves_clears_and_resumes(
    log_in: LogIn,
    owner: Client,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = log_in("admin")
    monkeypatch.setenv("REDRB_URL", client.url)
    with ExperienceStream(owner, TASK, namespace=namespace) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        stream.take(1, timeout=0).reject("broken")
    file = str(tmp_path / "math.redrb")
    common = ["--namespace", namespace]
    assert main(["save", TASK, file, *common]) == 0
    with ExperienceStream(client, TASK, namespace=namespace) as stream:
        assert stream.clear() == 1
    assert list(Registry(owner, namespace).names("task")) == []
    assert main(["resume", TASK, file, *common]) == 0
    with ExperienceStream(client, TASK, namespace=namespace) as stream:
        owner.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
        capsys.readouterr()
        assert main(["doctor", *common, "--repair", "--over", "0.01", "--json"]) == 0
        repairs = json.loads(capsys.readouterr().out)["repairs"]
        assert [(one["code"], one["done"]) for one in repairs] == [("orphaned-entries", True)]
        stream.put(numbered(3))
        assert numbers(stream.take(2, timeout=0)) == [2, 3]
    assert list(Registry(owner, namespace).names("task")) == [TASK]
    assert main(["rm", TASK, "--yes", *common]) == 0
    publish(client, namespace)
    assert remove_weights(client, "policy", namespace=namespace)
    assert main(["acl", "--role", "admin", "--task", "no task"]) == 2
    assert main(["acl", "--role", "admin"]) == 2


def test_the_rights_replace_those_that_a_user_had(
    log_in: LogIn, owner: Client, namespace: str
) -> None:
    client = log_in("admin")
    owner.execute(
        "ACL", "SETUSER", f"observer1-{namespace}", "on", "+@all", "allkeys", f">{SECRET}"
    )
    observer = log_in("observer")
    with pytest.raises(RedrbError):
        observer.execute("FLUSHALL")
    assert client.execute("TIME")


def test_a_maker_that_may_not_search_for_its_weights_says_so(
    log_in: LogIn,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(missing, "LOG_AFTER_S", 0.0)
    subscriber = redrb.WeightSubscriber(log_in("maker"), "policy", namespace=namespace)
    with pytest.raises(WeightTimeout):
        subscriber.wait(newer_than=0, timeout=0.2)
    assert "this user may not search for weights in other namespaces" in caplog.messages[-1]


@pytest.mark.parametrize(
    "words",
    [
        ["set", TASK, "limit=3"],
        ["rm", TASK, "--yes", "--force"],
        ["dead", "requeue", TASK, "--all"],
        ["dead", "drop", TASK, "--all", "--yes"],
        ["resume", "other", "saved"],
        ["doctor", "--over", "0.01", "--repair"],
        ["weights", "rm", "policy"],
        ["weights", "put", "policy", "state.safetensors"],
    ],
    ids=" ".join,
)
def test_an_observer_who_changes_something_learns_that_it_may_only_read(
    log_in: LogIn,
    owner: Client,
    namespace: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "state.safetensors")
    publish(owner, namespace)
    with ExperienceStream(owner, TASK, namespace=namespace, limit=4) as stream:
        stream.put_many([[numbered(1)], [numbered(2)]])
        stream.take(1, timeout=0).reject("bad")
        stream.save("saved")
        store = stream._task.store.client
        store.execute("XADD", stream._task.store.keys.stream, "9999999999999-*", "g", b"x")
        monkeypatch.setenv("REDRB_URL", log_in("observer", tasks=(TASK, "other")).url)
        before = content(owner, namespace)
        # doctor has looked at everything, and says among its findings what it could not repair
        assert main([*words, "--namespace", namespace]) == int(words[0] != "doctor")
        said = "".join(capsys.readouterr())
        assert "this user may only read: it may not run" in said
        assert "`redrb acl --role admin` prints those" in said
        assert content(owner, namespace) == before
