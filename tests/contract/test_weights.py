"""Publisher and subscriber, the same on fakeredis and on real servers."""

import dataclasses
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as library
from torch import nn

import redrb
from redrb.errors import (
    ConfigError,
    PublisherFenced,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
    WeightTimeout,
)
from redrb.weights.files.safetensors import load_safetensors, save_safetensors
from redrb.weights.publishing import upload
from redrb.weights.reading import catalogue
from tests.published import (
    CHUNK_BYTES,
    bits,
    every_kind,
    keys_of,
    prefix,
    stored_keys,
)


@pytest.fixture
def keys(client, namespace):
    """All keys of this test's weights, without their common prefix."""
    return lambda: keys_of(client, namespace)


def full_key(namespace, key):
    return prefix(namespace) + key


def model(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    made[1].running_mean.normal_()
    return made


def same(left, right):
    left, right = dict(left), dict(right)
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


@pytest.mark.parametrize("chunk_bytes", [1024, 4 << 20])
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    publisher, subscriber, monkeypatch, client, namespace, chunk_bytes
):
    monkeypatch.setattr(CHUNK_BYTES, chunk_bytes)
    state = every_kind()
    published = publisher.publish(state)
    fetched = subscriber.fetch()
    assert list(fetched) == list(state)
    for name, tensor in state.items():
        assert bits(fetched[name]) == bits(tensor), name
    assert fetched["tied"] is fetched["tied too"]
    assert published.tensors == len(state)
    assert len(stored_keys(client, namespace)) == -(-published.nbytes // chunk_bytes)


def test_poll_loads_into_the_tensors_and_only_newer_versions(publisher, subscriber):
    trained, made = model(1), model(2)
    places = [parameter.data_ptr() for parameter in made.parameters()]
    assert subscriber.poll(made) is None
    assert subscriber.version is None
    published = publisher.publish(trained)
    assert subscriber.poll(made) == published
    assert same(made.state_dict(), trained.state_dict())
    assert [parameter.data_ptr() for parameter in made.parameters()] == places
    assert all(parameter.requires_grad for parameter in made.parameters())
    assert subscriber.version == published.version == 1
    assert subscriber.poll(made) is None


def test_version_describes_the_published_state(publisher, subscriber, client):
    state = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    published = publisher.publish(state)
    assert (published.name, published.version, published.kind) == ("actor", 1, "full")
    assert (published.nbytes, published.stored_bytes, published.tensors) == (128, 128, 2)
    assert (published.base, published.delta_bytes) == (0, None)
    assert abs(published.created_s - time.time()) < 60
    assert subscriber.latest() == published
    with pytest.raises(dataclasses.FrozenInstanceError):
        published.version = 2


def test_versions_only_grow(publisher, subscriber):
    state = {"a": torch.zeros(1)}
    assert publisher.publish(state).version == 1
    assert publisher.publish(state, version=10).version == 10
    for stale in (10, 9, 1):
        with pytest.raises(ConfigError, match="not larger than 10"):
            publisher.publish(state, version=stale)
    assert publisher.publish(state).version == 11
    assert publisher.publish(state, version=2**53 - 1).version == 2**53 - 1
    assert subscriber.poll({"a": torch.ones(1)}).version == 2**53 - 1
    with pytest.raises(ConfigError, match="not larger"):
        publisher.publish(state)


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, 2**53])
def test_a_version_is_a_positive_integer(publisher, version):
    with pytest.raises(ConfigError, match="must be an int"):
        publisher.publish({"a": torch.zeros(1)}, version=version)


def test_fetch_before_anything_is_published(subscriber):
    with pytest.raises(WeightError, match="nothing is published yet"):
        subscriber.fetch()


def test_names_and_namespaces_are_apart(client, namespace, publisher):
    redrb.WeightPublisher(client, "critic", namespace=namespace).publish({"c": torch.zeros(1)})
    publisher.publish({"a": torch.zeros(1)})
    for name, found in {"actor": "a", "critic": "c"}.items():
        assert list(redrb.WeightSubscriber(client, name, namespace=namespace).fetch()) == [found]
    other = redrb.WeightSubscriber(client, "actor", namespace=namespace + "-2")
    assert other.latest() is None


def test_a_mismatch_changes_nothing(publisher, subscriber):
    publisher.publish({"a": torch.ones(2), "b": torch.ones(3)})
    live = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(WeightMismatch, match="b "):
        subscriber.poll(live)
    assert not live["a"].any()
    assert subscriber.version is None


class TiedModel(nn.Module):
    """Tied in all ways that models use: one parameter of two modules, and a view of another."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight
        if view:
            self.register_buffer("first_rows", self.embed.weight.detach()[:2])
        self.own = nn.Linear(3, 3)


def _in_a_file(model: nn.Module, folder: Path, *, names: str) -> Any:
    tensors = {name: each.detach() for name, each in model.state_dict().items()}
    if names == "all":
        save_safetensors(folder / "model.safetensors", tensors)
    else:
        library.save_model(model, str(folder / "model.safetensors"))
    return load_safetensors(folder)


@pytest.mark.parametrize("strict", [True, "model"])
@pytest.mark.parametrize(
    "published", ["module", "state_dict", "parameters", "head", "file", "their file"]
)
def test_a_tied_model_is_loaded_whatever_names_were_published(
    publisher, subscriber, tmp_path, published, strict
):
    """A name counts as published when a published tensor fills its memory."""
    # safetensors' own file names a view as tied to the whole tensor
    model, live = (TiedModel(view=published != "their file") for _ in range(2))
    state = model.state_dict()
    for _ in range(2):  # the second version is a delta
        publisher.publish(
            {
                "module": lambda: model,
                "state_dict": lambda: state,
                "parameters": lambda: dict(model.named_parameters()),
                "head": lambda: {n: t for n, t in state.items() if n not in ("embed.weight",)},
                "file": lambda: _in_a_file(model, tmp_path, names="all"),
                "their file": lambda: _in_a_file(model, tmp_path, names="one"),
            }[published]()
        )
        subscriber.poll(live, strict=strict)
        for name, tensor in live.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        assert live.head.weight is live.embed.weight
        with torch.no_grad():
            model.own.weight += 1
            model.embed.weight[:2] *= 2


def test_memory_that_nothing_fills_is_missing(publisher, subscriber):
    publisher.publish({"rows": torch.ones(2, 3)})
    whole = torch.zeros(4, 3)
    target = {"rows": whole[:2]}
    for other in (whole, whole[1:3], whole[:2].clone(), whole[:2].double()):
        with pytest.raises(WeightMismatch, match="not published: other"):
            subscriber.poll(target | {"other": other})
    assert subscriber.poll(target | {"first": whole[0]}).version == 1
    assert torch.equal(whole[:3].sum(1), torch.tensor([3.0, 3.0, 0.0]))


def test_a_tied_tensor_loads_by_either_name(publisher, subscriber):
    base = torch.randn(6)
    publisher.publish({"embed": base, "head": base})
    live = {"head": torch.zeros(6)}
    subscriber.poll(live, strict=False)
    assert torch.equal(live["head"], base)


def test_wait_wakes_at_the_commit(publisher, subscriber):
    state = {"a": torch.zeros(1)}
    publisher.publish(state)
    woken = []

    def wait():
        woken.append((subscriber.wait(newer_than=1, timeout=10), time.monotonic()))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    assert not woken
    publisher.publish(state, version=5)
    committed_at = time.monotonic()
    waiter.join()
    version, woken_at = woken[0]
    assert version.version == 5
    assert woken_at - committed_at < 4  # and not when its read of BLOCK_S ends
    assert subscriber.version is None


def test_wait_returns_a_present_version_at_once(publisher, subscriber):
    published = publisher.publish({"a": torch.zeros(1)})
    assert subscriber.wait() == published
    subscriber.poll({"a": torch.zeros(1)})
    with pytest.raises(WeightTimeout):
        subscriber.wait(timeout=0)


def test_timeout_of_wait_names_the_awaited_version(publisher, subscriber):
    with pytest.raises(WeightTimeout, match=r"'actor'.* newer than 0 .*none is published"):
        subscriber.wait(timeout=0.05)
    publisher.publish({"a": torch.zeros(1)})
    started = time.monotonic()
    with pytest.raises(WeightTimeout, match=r"newer than 11 within \d+\.\d s; the newest is 1"):
        subscriber.wait(newer_than=11, timeout=0.1)
    assert 0.1 <= time.monotonic() - started < 30


@pytest.mark.parametrize("overwritten", [b"", b"short", b"\1" * 1024, b"\1" * 1025])
def test_a_corrupt_chunk_is_never_loaded(
    client, namespace, publisher, subscriber, keys, small_chunks, overwritten
):
    publisher.publish({"a": torch.zeros(1000)})
    damaged = [key for key in keys() if key.startswith("chunk:")][1]
    client.execute("SET", full_key(namespace, damaged), overwritten)
    live = {"a": torch.ones(1000)}
    with pytest.raises(WeightError if not overwritten else WeightCorrupt):
        subscriber.poll(live)
    assert live["a"].all()
    assert subscriber.version is None
    # a delta would stand on the damaged version, and a full one may share its chunks
    redrb.WeightPublisher(client, "actor", namespace=namespace).publish({"a": torch.zeros(1000)})
    assert subscriber.poll(live).version == 2
    assert not live["a"].any()


def test_a_reader_whose_version_is_evicted_goes_on_with_the_newest(
    client, namespace, subscriber, monkeypatch, small_chunks
):
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1, deltas=False)
    publisher.publish({"a": torch.full((1000,), 1.0)})
    overtaken = []

    def fetch(*arguments, original=catalogue.fetch):
        if not overtaken:
            client.execute("DEL", full_key(namespace, "pins"))  # it was silent for too long
            overtaken.append(publisher.publish({"a": torch.full((1000,), 2.0)}))
        original(*arguments)

    monkeypatch.setattr(catalogue, "fetch", fetch)
    live = {"a": torch.zeros(1000)}
    assert subscriber.poll(live) == overtaken[0]
    assert (live["a"] == 2).all()


def test_chunks_that_stay_away_are_reported(client, namespace, publisher, subscriber, keys):
    publisher.publish({"a": torch.zeros(10)})
    client.execute("DEL", full_key(namespace, keys()[0]))
    with pytest.raises(WeightError, match="gone 3 times"):
        subscriber.fetch()


def test_a_publisher_fenced_in_mid_publish_leaves_nothing(
    client, namespace, publisher, subscriber, keys, monkeypatch
):
    publisher.publish({"a": torch.zeros(1)})
    before = keys()

    def send(*arguments, original=upload.upload, **options):
        redrb.WeightPublisher(client, "actor", namespace=namespace)
        original(*arguments, **options)

    monkeypatch.setattr(upload, "upload", send)
    with pytest.raises(PublisherFenced) as caught:
        publisher.publish({"a": torch.ones(1)})
    place = f"process {os.getpid()} on {socket.gethostname()}, at {datetime.now(UTC):%Y-%m-%d}"
    assert place in str(caught.value)
    assert keys() == before
    assert subscriber.latest().version == 1


_OWNED = b" host-1-" + b"0" * 20


@pytest.mark.parametrize("end", [b" x", b" \xff-1-" + b"0" * 20, b"9" * 300 + _OWNED, _OWNED])
def test_a_fenced_publisher_names_only_an_owner_of_redrb(client, namespace, publisher, end):
    fence = f"redrb:{{{namespace}:weights:actor}}:fence"
    client.at(fence).execute("HSET", fence, "owner", b"9" * 17 + end)
    with pytest.raises(PublisherFenced) as caught:
        publisher.publish({"a": torch.ones(1)})
    assert ("by process 1 on host" in str(caught.value)) is (end == _OWNED)


def test_loading_waits_for_the_holder_of_the_lock(client, namespace, publisher):
    lock = threading.Lock()
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace, lock=lock)
    assert subscriber.lock is lock
    publisher.publish({"a": torch.ones(4), "b": torch.ones(4)})
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    with lock:
        loader = threading.Thread(target=subscriber.poll, args=[live])
        loader.start()
        loader.join(0.3)
        assert loader.is_alive()
        assert not live["a"].any()
        assert subscriber.version is None
    loader.join()
    assert live["a"].all()
    assert live["b"].all()


def test_the_holder_of_the_lock_never_sees_half_an_update(publisher, subscriber, small_chunks):
    live = {f"t{i}": torch.zeros(300) for i in range(8)}
    publisher.publish(live)
    done = threading.Event()
    seen = set()

    def generate():
        while not done.is_set():
            with subscriber.lock:
                values = {value.item() for tensor in live.values() for value in tensor[::100]}
            seen.add(frozenset(values))

    generator = threading.Thread(target=generate)
    generator.start()
    for step in range(1, 16):
        publisher.publish({name: torch.full((300,), float(step)) for name in live})
        subscriber.poll(live)
    done.set()
    generator.join()
    assert all(len(values) == 1 for values in seen)


def test_own_lock_is_reentrant(publisher, subscriber):
    publisher.publish({"a": torch.ones(1)})
    live = {"a": torch.zeros(1)}
    with subscriber.lock:
        subscriber.poll(live)
    assert live["a"].all()


def test_names_that_cannot_be_keys_are_refused(client):
    for cls in (redrb.WeightPublisher, redrb.WeightSubscriber):
        with pytest.raises(ConfigError):
            cls(client, "actor}:x")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_version_of_no_bytes(publisher, subscriber, in_place):
    state = {"a": torch.empty(0, 3)}
    assert publisher.publish(state).nbytes == 0
    live = {"a": torch.empty(0, 3)}
    assert subscriber.poll(live, in_place=in_place).version == 1
    assert publisher.publish(state).kind == "delta"
    assert subscriber.poll(live, in_place=in_place).version == 2
    assert subscriber.fetch()["a"].shape == (0, 3)


def test_polls_of_two_threads_take_turns(publisher, subscriber, monkeypatch):
    """The one that began later ends later: it has what is newer."""
    publisher.publish({"a": torch.full((3,), 1.0)})
    live = {"a": torch.zeros(3)}
    found, begun = [], threading.Event()

    def fetch(*arguments, original=catalogue.fetch):
        if not begun.is_set():
            begun.set()
            publisher.publish({"a": torch.full((3,), 2.0)})
            later.join(0.2)
            assert later.is_alive()
        original(*arguments)

    def second():
        begun.wait(10)
        found.append(subscriber.poll(live))

    monkeypatch.setattr(catalogue, "fetch", fetch)
    later = threading.Thread(target=second)
    later.start()
    assert subscriber.poll(live).version == 1
    later.join(10)
    assert found[0].version == 2
    assert (live["a"] == 2).all()
    assert subscriber.version == 2


def test_two_models_are_one_version(publisher, subscriber, client, namespace):
    actor, critic = model(1), nn.Linear(3, 2)
    publisher.publish({"actor": actor, "critic": critic})
    mine = {"actor": model(2), "critic": nn.Linear(3, 2)}
    assert subscriber.poll(mine).tensors == len(actor.state_dict()) + 2
    assert same(mine["actor"].state_dict(), actor.state_dict())
    assert same(mine["critic"].state_dict(), critic.state_dict())
    one = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    alone = {"critic": nn.Linear(3, 2)}
    with pytest.raises(WeightMismatch, match="published but not in the model"):
        one.poll(alone)
    assert one.poll(alone, strict="model").version == 1
    assert same(alone["critic"].state_dict(), critic.state_dict())
    with pytest.raises(WeightMismatch, match="not published"):
        redrb.WeightSubscriber(client, "actor", namespace=namespace).poll(
            alone | {"reward": nn.Linear(3, 2)}, strict="model"
        )


def test_a_wrong_client_lock_or_time_is_refused_at_once(client, namespace):
    for kind in (redrb.WeightPublisher, redrb.WeightSubscriber):
        with pytest.raises(ConfigError, match=r"redrb\.connect") as caught:
            kind("redis://maker:s3cret@host", "actor")
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="lock"):
        redrb.WeightSubscriber(client, "actor", namespace=namespace, lock=3)
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    with pytest.raises(ConfigError, match="timeout"):
        subscriber.wait(timeout="1")
    with pytest.raises(ConfigError, match="strict"):
        subscriber.poll({"a": torch.zeros(1)}, strict="all")
