"""transfer_queue's batches, and how redrb takes the place of the package; without Redis."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from redrb.compat import transfer_queue as tq
from redrb.compat.transfer_queue import absent, guard, installing, session
from redrb.compat.transfer_queue.metadata import Written
from redrb.compat.transfer_queue.process import NAME, check_process
from redrb.errors import ConfigError

VERL = "verl.utils.transferqueue_utils"


@pytest.fixture(autouse=True)
def modules() -> Iterator[dict[str, ModuleType]]:
    """The loaded modules, as they were after the test."""
    before = dict(sys.modules)
    yield sys.modules
    session._queue = None
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in (NAME, "verl", "ray", "user"):
            del sys.modules[name]


def batch(*keys: str, **options: Any) -> tq.KVBatchMeta:
    tags = [{"n": place} for place in range(len(keys))]
    return tq.KVBatchMeta(keys=list(keys), tags=tags, partition_id="train", **options)


def numbered(number: int, field_names: str = "") -> tq.BatchMeta:
    return tq.BatchMeta([number], ["p"], field_names, keys=["k"])


# Batches


def test_batches_of_keys_are_cut_joined_and_reordered() -> None:
    whole = batch("a", "b", "c", "d", "e", fields=["x"], extra_info={"t": torch.ones(2)})
    parts = whole.chunk(2)
    assert [part.keys for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [len(part) for part in batch("a").chunk(3)] == [1, 0, 0]
    joined = tq.KVBatchMeta.concat([*parts, tq.KVBatchMeta()])
    assert (joined.keys, joined.tags, joined.fields) == (whole.keys, whole.tags, ["x"])
    assert torch.equal(joined.extra_info["t"], torch.ones(2))
    assert (joined.size, len(tq.KVBatchMeta.concat([]))) == (5, 0)
    joined.reorder([4, 3, 2, 1, 0])
    assert joined.keys == ["e", "d", "c", "b", "a"]
    assert [tags["n"] for tags in joined.tags] == [4, 3, 2, 1, 0]
    selected = whole.select_keys(["d", "a"])
    assert (selected.keys, selected.tags) == (["d", "a"], [{"n": 3}, {"n": 0}])
    selected.tags[0]["n"] = 9
    assert whole.tags[3] == {"n": 3}
    assert str(batch("a")) == "KVBatchMeta(size=1, field_names=None, extra_info={})"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tq.KVBatchMeta(keys=["a"], tags=[]), "same length"),
        (lambda: batch("a", "a"), "keys has a name twice"),
        (lambda: batch("a", fields=["x", "x"]), "fields has a name twice"),
        (lambda: batch("a").select_keys(["b"]), r"\['b'\] were not found"),
        (lambda: batch("a", "b").reorder([0, 0]), "each number from 0 to 1"),
        (lambda: tq.KVBatchMeta.concat([batch("a"), batch("b", fields=["x"])]), "other fields"),
        (
            lambda: tq.KVBatchMeta.concat([batch("a"), tq.KVBatchMeta(["b"], [{}], "val")]),
            "several partitions",
        ),
        (
            lambda: tq.KVBatchMeta.concat(
                [batch("a", extra_info={"t": 1}), batch("b", extra_info={"t": torch.ones(1)})]
            ),
            r"extra_info\['t'\]",
        ),
        (lambda: tq.BatchMeta([1], ["p"]), "async_kv_retrieve_meta makes batches"),
        (lambda: numbered(1).select_samples([1]), "places from 0 to 0"),
        (
            lambda: tq.BatchMeta.concat([numbered(1), numbered(2, "x")]),
            "other fields",
        ),
        (lambda: tq.BatchMeta().union(tq.BatchMeta()), r"no transfer_queue\.BatchMeta\.union"),
    ],
)
def test_batches_that_are_wrong(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_batches_of_numbers() -> None:
    whole = tq.BatchMeta([5, 6, 7], ["p"] * 3, ["y", "x"], {"t": [1]}, keys=["a", "b", "c"])
    assert (whole.field_names, whole.is_ready, tq.BatchMeta.empty().is_ready) == (
        ["x", "y"],
        True,
        False,
    )
    parts = whole.chunk(2)
    assert [(part.global_indexes, part.keys) for part in parts] == [
        ([5, 6], ["a", "b"]),
        ([7], ["c"]),
    ]
    selected = whole.select_fields(["x", "z"])
    assert (selected.field_names, selected.keys) == (["x"], ["a", "b", "c"])
    selected.extra_info["t"].append(2)
    assert whole.extra_info == {"t": [1]}
    mixed = tq.BatchMeta.concat([whole, tq.BatchMeta([8], ["q"], "xy", keys="d"), tq.BatchMeta()])
    assert (mixed.size, mixed.keys, mixed.partition_ids[-1]) == (4, ["a", "b", "c", "d"], "q")
    assert mixed.copy().extra_info == {"t": [1]}
    found = pickle.loads(pickle.dumps(whole))
    assert (found.global_indexes, found.extra_info) == ([5, 6, 7], {"t": [1]})


@pytest.mark.parametrize("look", [repr, str, format, len, bool, vars, dir, hasattr], ids=str)
def test_a_look_at_written_rows_reads_nothing(look: Any) -> None:
    """A log line, a debugger or a comparison must not wait for Redis, nor fail without it."""
    written, same = (Written(["a", "b"], "train", pytest.fail) for _ in range(2))
    look(*(written, "size")[: 2 if look is hasattr else 1])
    assert written == same
    assert written != Written(["a"], "train", pytest.fail)
    assert written != Written(["a", "b"], "val", pytest.fail)
    assert written != batch("a", "b")


def test_written_rows_are_read_once_when_tags_or_columns_are_asked_for() -> None:
    reads = []

    def read(keys: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        reads.append(list(keys))
        return [{"of": key} for key in keys], ["x"]

    asks: list[Callable[[Written], Any]] = [
        lambda each: (each.fields, each.tags),
        lambda each: each.reorder([2, 0, 1]),
        lambda each: each.select_keys(["c", "a"]),
        lambda each: each.chunk(2),
        lambda each: tq.KVBatchMeta.concat([each, batch("d", fields=["x"])]),
        lambda each: pickle.loads(pickle.dumps(each)),
    ]
    for ask in asks:
        written = Written(["a", "b", "c"], "train", read)
        found = ask(written)
        assert reads == [["a", "b", "c"]]
        assert [tags["of"] for tags in written.tags] == written.keys
        assert (written.fields, len(reads)) == (["x"], 1)
        if type(found) is tq.KVBatchMeta:
            assert found.fields == ["x"]
            assert [tags.get("of", "d") for tags in found.tags] == found.keys
        reads.clear()


def test_what_is_missing_can_be_imported_and_says_so_at_the_call() -> None:
    class Sampler(tq.BaseSampler):
        pass

    classes = [getattr(tq, name) for name in absent.ABSENT[""].split()]
    assert issubclass(Sampler, classes[2])
    calls = [
        getattr(kind, name)
        for kind in (tq.TransferQueueClient, tq.BatchMeta)
        for name in absent.ABSENT[kind.__name__].split()
    ]
    assert (len(classes), len(calls)) == (7, 42)
    for missing in (Sampler, *classes, *calls):
        with pytest.raises(ConfigError, match="redrb has no transfer_queue"):
            missing(batch_size=1)
    with pytest.raises(AttributeError):
        absent.Sampler  # noqa: B018


# The place of the package


def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of the same name, with a module that has imported it before redrb came."""
    theirs, user, part = ModuleType(NAME), ModuleType("user"), ModuleType(f"{NAME}.metadata")
    theirs.KVBatchMeta, theirs.BatchMeta = type("KVBatchMeta", (), {}), type("BatchMeta", (), {})
    theirs.kv_put = lambda: None
    user.tq, user.KVBatchMeta, user.put = theirs, theirs.KVBatchMeta, theirs.kv_put
    user.other = 1
    for module in (theirs, user, part):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return user


def test_redrb_takes_the_place_of_the_package_where_it_was_imported_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = package(monkeypatch)
    module = tq.install()
    assert sys.modules[NAME] is module is tq.install()
    import transfer_queue

    assert transfer_queue is user.tq is module
    assert (user.KVBatchMeta, user.put, user.other) == (tq.KVBatchMeta, tq.kv_put, 1)
    assert Version(module.__version__) >= Version("0.1.9")  # verl's condition for checkpoints
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.metadata")
    assert not hasattr(module, "install")


def test_redrb_takes_the_place_of_verls_substitutes(monkeypatch: pytest.MonkeyPatch) -> None:
    mocks, protocol = ModuleType(VERL), ModuleType("verl.protocol")
    mocks.tq, mocks.KVBatchMeta, mocks.BatchMeta = object(), type("K", (), {}), type("B", (), {})
    protocol.BatchMeta = mocks.BatchMeta
    for module in (mocks, protocol):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    installed = tq.install()
    assert mocks.tq is installed
    assert mocks.KVBatchMeta is tq.KVBatchMeta
    assert protocol.BatchMeta is tq.BatchMeta
    assert sys.modules[VERL] is mocks


def test_a_package_in_use_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch)
    used = SimpleNamespace(_TQ_CLIENT=object())
    monkeypatch.setitem(sys.modules, f"{NAME}.interface", used)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="in use in this process already"):
        tq.install()


def test_a_process_that_does_not_use_redrb_refuses_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [pickle.dumps(batch("a")), pickle.dumps(numbered(1))]
    check_process()
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    for each in stored:
        with pytest.raises(ConfigError, match="Set REDRB_TRANSFER_QUEUE=1 and REDRB_URL"):
            pickle.loads(each)
    tq.install()
    assert pickle.loads(stored[0]).keys == ["a"]


def load_plugin() -> None:
    sys.modules.pop("redrb.compat.transfer_queue.plugin", None)
    importlib.import_module("redrb.compat.transfer_queue.plugin")


def test_the_plugin_acts_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv("REDRB_TRANSFER_QUEUE", value)
        load_plugin()
        assert NAME not in sys.modules
    monkeypatch.setenv("REDRB_TRANSFER_QUEUE", "1")
    load_plugin()
    assert sys.modules[NAME].kv_put is tq.kv_put


def test_a_plugin_that_fails_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception alone would pass: verl logs it at DEBUG, and goes on without redrb."""
    monkeypatch.setenv("REDRB_TRANSFER_QUEUE", "true")
    with pytest.raises(SystemExit, match="set 1, or 0"):
        load_plugin()
    assert "redrb cannot take the place" in caplog.text

    def fails() -> None:
        raise ImportError("no tensordict")

    monkeypatch.setenv("REDRB_TRANSFER_QUEUE", "1")
    monkeypatch.setattr(installing, "install", fails)
    monkeypatch.setattr(tq, "install", fails, raising=False)
    with pytest.raises(SystemExit, match="no tensordict"):
        load_plugin()


# Ray


class Ray(ModuleType):
    """What the guard uses of Ray, in one process."""

    class exceptions:  # noqa: N801
        class RayActorError(Exception):
            pass

        class GetTimeoutError(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: dict[tuple[str, str], Any] = {}
        self.dead = self.silent = False

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: type) -> Any:
        def options(name: str, namespace: str, num_cpus: int) -> Any:
            def start(*arguments: Any) -> Any:
                actor = kind(*arguments)
                calls = {call: getattr(actor, call) for call in ("run", "get_config")}
                handle = SimpleNamespace(
                    **{call: SimpleNamespace(remote=made) for call, made in calls.items()}
                )
                self.actors[name, namespace] = handle
                return handle

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def get(self, value: Any, timeout: float) -> Any:
        assert timeout > 0
        if self.silent:
            raise self.exceptions.GetTimeoutError
        if self.dead:
            raise self.exceptions.RayActorError
        return value

    def get_actor(self, name: str, namespace: str) -> Any:
        try:
            return self.actors[name, namespace]
        except KeyError:
            raise ValueError(name) from None

    def kill(self, handle: Any) -> None:
        self.actors.clear()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_the_guard_refuses_processes_that_use_transfer_queue(ray: Ray) -> None:
    handle = guard.place("r1", "redis://host, namespace 'n'")
    theirs = ray.get_actor("TransferQueueController", "transfer_queue")  # what it looks for
    with pytest.raises(ConfigError, match=r"keeps its rows in redrb at redis://host.*REDRB_URL"):
        theirs.get_config.remote()
    assert guard.find() == ("r1", "redis://host, namespace 'n'")
    guard.end(handle)
    assert guard.find() is None


def test_a_driver_that_uses_transfer_queue_is_noticed(ray: Ray) -> None:
    ray.actors["TransferQueueController", "transfer_queue"] = object()
    with pytest.raises(ConfigError, match="in the driver's environment"):
        guard.find()


def test_the_guard_of_a_driver_that_was_killed_counts_no_more(ray: Ray) -> None:
    guard.place("r1", "here")
    ray.dead = True
    assert guard.find() is None


def test_an_actor_that_does_not_answer_is_an_error(ray: Ray) -> None:
    guard.place("r1", "here")
    ray.silent = True
    with pytest.raises(ConfigError, match="ray status"):
        guard.find()


def test_with_ray_a_process_joins_the_run_of_the_driver_only(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRB_URL", f"fake://{id(ray)}")
    monkeypatch.setenv("REDRB_NAMESPACE", "here")
    for _ in range(2):  # each job has its own driver, which needs no settings
        session.init()
        assert ray.actors
        tq.kv_put("a", "train", tag={})
        assert tq.kv_list() == {"train": {"a": {}}}
        driver = session._queue
        session._queue = None
        session.init({"enable": True})  # a worker: with Ray it is not the first
        assert tq.kv_list() == {"train": {"a": {}}}
        session.close()
        session._queue = driver
        session.close()
        assert not ray.actors
    session.init()
    session._queue = None
    monkeypatch.setenv("REDRB_NAMESPACE", "elsewhere")
    with pytest.raises(ConfigError, match=r"driver of this run keeps its rows at .*'here'"):
        session.init()
