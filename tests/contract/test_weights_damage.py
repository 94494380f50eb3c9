"""Damaged or interrupted fetches: readers fetch all again or load nothing, or raise WeightsTorn."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
import redis
import torch
from torch import nn

import redrb
from redrb.connection.transport import read_reply
from redrb.errors import (
    ConfigError,
    DecodeError,
    RedrbError,
    StoreUnavailable,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
    WeightsTorn,
)
from redrb.weights.reading import catalogue, replica
from redrb.weights.reading.state_copies import InPlaceCopy
from redrb.weights.wire.chunks import ChunkGoneError
from tests.published import bits, keys_of, lose_all, prefix, same_bits, weights, zeros

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def hasty(client, monkeypatch):
    """Let the client give requests up soon."""
    monkeypatch.setattr(client, "retry_s", 0.2)


@pytest.fixture
def fetched(monkeypatch):
    """Keys that readers ask for, without prefix."""
    found = []

    def fetch(client, values, *, original=catalogue.fetch):
        found.extend(value.key.partition("}:")[2] for value in values)
        original(client, values)

    monkeypatch.setattr(catalogue, "fetch", fetch)
    return found


def on_version(publisher, subscriber, **options):
    """Return a target that has version 1, of two that are published."""
    publisher.publish(weights(0))
    target = zeros()
    subscriber.poll(target, **options)
    assert publisher.publish(weights(1)).kind == "delta"
    return target


MODES = pytest.mark.parametrize(
    "options", [{}, {"in_place": True}], ids=["private copy", "in place"]
)


@MODES
def test_without_doubt_the_delta_is_all_that_is_fetched(publisher, subscriber, fetched, options):
    target = on_version(publisher, subscriber, **options)
    del fetched[:]
    assert subscriber.poll(target, **options).version == 2
    assert fetched == ["delta:2:0"]
    assert same_bits(target, weights(1))


@pytest.mark.parametrize("place", [0, 7, 1000, 1999])
def test_changed_tensors_are_fetched_again_in_place(publisher, subscriber, fetched, place):
    target = on_version(publisher, subscriber, in_place=True)
    target["a"][place] += 1
    del fetched[:]
    assert subscriber.poll(target, in_place=True).version == 2
    assert "chunk:1:0" in fetched
    assert same_bits(target, weights(1))


def test_exchanged_tensors_are_fetched_again_in_place(publisher, subscriber):
    target = on_version(publisher, subscriber, in_place=True)
    target["a"] = torch.zeros_like(target["a"])
    subscriber.poll(target, in_place=True)
    assert same_bits(target, weights(1))


def test_changes_below_the_precision_that_was_published_do_not_stay(publisher, subscriber):
    """A float32 model of bfloat16 weights: what its user added is less than bfloat16 sees."""
    publisher.publish(weights(0))
    target = zeros() | {"a": torch.zeros(2000)}
    subscriber.poll(target, in_place=True)
    target["a"][1500] *= 1 + 2**-20
    publisher.publish(weights(1))
    subscriber.poll(target, in_place=True)
    assert bits(target["a"]) == bits(weights(1)["a"].float())


def test_in_place_into_less_precision_than_was_published(publisher, subscriber):
    """Version 2 is a delta: a reader that joins takes version 1 first."""
    state = {"a": torch.randn(2000)}
    publisher.publish(state)
    state["a"][3] += 1
    assert publisher.publish(state).kind == "delta"
    target = {"a": torch.zeros(2000, dtype=torch.float16)}
    assert subscriber.poll(target, in_place=True).version == 2
    assert bits(target["a"]) == bits(state["a"].half())


def test_a_nan_in_place_into_another_dtype(publisher, subscriber):
    """Casts there and back do not keep its bits; 0xFFC0 is what x86 makes of 0 / 0."""
    state = {"a": torch.randn(2000).bfloat16()}
    state["a"].view(torch.int16)[7] = -64
    publisher.publish(state)
    state["a"][3] += 1
    assert publisher.publish(state).kind == "delta"
    target = {"a": torch.zeros(2000)}
    assert subscriber.poll(target, in_place=True).version == 2
    assert bits(target["a"]) == bits(state["a"].float())


def test_tied_targets_of_two_dtypes_in_place(publisher, subscriber):
    """Each has what was published, rounded once to its own dtype."""
    weight = torch.randn(50)
    publisher.publish({"tied": weight, "tied too": weight})
    target = {"tied": torch.zeros(50, dtype=torch.float16), "tied too": torch.zeros(50)}
    subscriber.poll(target, in_place=True)
    assert torch.equal(target["tied too"], weight)
    assert torch.equal(target["tied"], weight.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_tensors_in_place(publisher, subscriber, dtype):
    state = {"a": torch.randn(2000).bfloat16()}
    publisher.publish(state)
    with torch.inference_mode():
        target = {"a": torch.zeros(2000, dtype=dtype)}
    for _ in range(2):
        subscriber.poll(target, in_place=True)
        assert torch.equal(target["a"], state["a"].to(dtype))
        state["a"][7] += 1
        publisher.publish(state)


def test_changed_private_memory_is_fetched_again(publisher, subscriber, fetched):
    target = on_version(publisher, subscriber)
    subscriber._loader.copy._replica.state.memory[3000] ^= 1
    del fetched[:]
    assert subscriber.poll(target).version == 2
    assert "chunk:1:0" in fetched
    assert same_bits(target, weights(1))


def damage(client, namespace, key, how):
    stored = client.execute("GET", prefix(namespace) + key)
    new = {
        "flipped": stored[:-1] + bytes([stored[-1] ^ 1]),
        "cut": stored[:-1],
        "gone": None,
    }[how]
    command = ("DEL",) if new is None else ("SET",)
    client.execute(*command, prefix(namespace) + key, *([] if new is None else [new]))


HOWS = ["flipped", "cut", "gone"]


@MODES
@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_delta_beside_a_full_version(
    client, namespace, subscriber, fetched, options, how
):
    """An anchor can be fetched by either way."""
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, anchor_every=2)
    publisher.publish(weights(0))
    target = zeros()
    subscriber.poll(target, **options)
    publisher.publish(weights(1))
    subscriber.poll(target, **options)
    anchor = publisher.publish(weights(2))
    assert anchor.kind == "full"
    damage(client, namespace, f"delta:{anchor.version}:0", how)
    del fetched[:]
    assert subscriber.poll(target, **options) == anchor
    assert len(fetched) > 7
    assert same_bits(target, weights(2))


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_delta_that_there_is_no_way_around_loads_nothing(
    client, namespace, publisher, subscriber, how
):
    target = on_version(publisher, subscriber)
    damage(client, namespace, "delta:2:0", how)
    with pytest.raises(WeightError):
        subscriber.poll(target)
    assert same_bits(target, weights(0))
    assert subscriber.version == 1
    with pytest.raises(WeightError):
        subscriber.fetch()
    assert same_bits(subscriber.fetch(1), weights(0))
    state = weights(3)
    state["a"].view(torch.int16).random_()
    assert publisher.publish(state).kind == "full"
    assert subscriber.poll(target).version == 3
    assert same_bits(target, state)


@pytest.mark.parametrize("how", HOWS)
def test_in_place_a_damaged_delta_is_reported_as_torn_and_mended(
    client, namespace, publisher, subscriber, how
):
    target = on_version(publisher, subscriber, in_place=True)
    damage(client, namespace, "delta:2:0", how)
    with pytest.raises(WeightsTorn, match="mixture"):
        subscriber.poll(target, in_place=True)
    assert subscriber.version is None
    with pytest.raises(WeightsTorn):
        subscriber.poll(target, in_place=True)
    publisher.publish({name: tensor + 1 for name, tensor in weights(0).items()})
    assert subscriber.poll(target, in_place=True).version == 3
    assert same_bits(target, {name: tensor + 1 for name, tensor in weights(0).items()})


@MODES
@pytest.mark.parametrize("reordered", [False, True])
def test_another_base_under_the_same_number(
    client, namespace, make, subscriber, options, reordered
):
    """The server was emptied, and counts anew: what is version 1 now is not what was loaded."""
    make().publish(weights(0))
    target = zeros()
    subscriber.poll(target, **options)
    lose_all(client, namespace)
    other = make()
    for version, kind in ((1, "full"), (2, "delta")):
        state = dict(sorted(weights(version).items(), reverse=reordered))
        assert other.publish(state).kind == kind
        if version == 2 or not reordered:
            assert subscriber.poll(target, **options).version == version
            assert same_bits(target, weights(version))


def test_other_targets_of_the_same_weights(publisher, subscriber):
    """Only part of the chunks were kept up; all are wanted now."""
    publisher.publish(weights(0))
    subscriber.poll({"b": torch.zeros(600, dtype=torch.int32)}, strict="model")
    publisher.publish(weights(1))
    target = zeros()
    assert subscriber.poll(target).version == 2
    assert same_bits(target, weights(1))
    publisher.publish(weights(2))
    part = {"a": torch.zeros(2000)}
    subscriber.poll(part, strict=False)
    assert torch.equal(part["a"], weights(2)["a"].float())


def breaking(monkeypatch, error, *, after=3):
    """Break off when some values were received."""
    received = []

    def take(connection, value, original=redrb.weights.wire.chunks._receive):
        if len(received) >= after:
            raise error
        received.append(value.key)
        original(connection, value)

    monkeypatch.setattr("redrb.weights.wire.chunks._receive", take)
    return received


@pytest.mark.parametrize("in_place", [False, True])
def test_a_fetch_that_breaks_off(
    client, namespace, publisher, subscriber, monkeypatch, hasty, in_place
):
    publisher.publish(weights(0))
    target = zeros()
    subscriber.poll(target, in_place=in_place)
    new = {name: tensor + 9 for name, tensor in weights().items()}
    assert publisher.publish(new).kind == "full"
    with monkeypatch.context() as patch:
        received = breaking(patch, redis.ConnectionError("broken"))
        with pytest.raises(WeightsTorn if in_place else StoreUnavailable) as caught:
            subscriber.poll(target, in_place=in_place)
        assert len(received) == 3
    if in_place:
        assert isinstance(caught.value.__cause__, StoreUnavailable)
        assert subscriber.version is None
        assert not same_bits(target, weights(0))
    else:
        assert subscriber.version == 1
        assert same_bits(target, weights(0))
    assert subscriber.poll(target, in_place=in_place).version == 2
    assert same_bits(target, new)
    assert "pins" not in keys_of(client, namespace)


def test_before_the_first_byte_nothing_is_torn(publisher, subscriber, monkeypatch, hasty):
    target = on_version(publisher, subscriber, in_place=True)
    with pytest.raises(WeightMismatch):
        subscriber.poll({"a": torch.zeros(1)}, in_place=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            catalogue.Pin,
            "route",
            lambda *_, **__: (_ for _ in ()).throw(StoreUnavailable("away", where="there")),
        )
        with pytest.raises(StoreUnavailable):
            subscriber.poll(target, in_place=True)
    assert subscriber.version == 1
    assert same_bits(target, weights(0))


@MODES
def test_a_delta_that_breaks_off_before_any_change_is_resumed(
    publisher, subscriber, monkeypatch, hasty, fetched, options
):
    target = on_version(publisher, subscriber, **options)
    with monkeypatch.context() as patch:
        breaking(patch, redis.ConnectionError("broken"), after=0)
        with pytest.raises(StoreUnavailable):
            subscriber.poll(target, **options)
    assert subscriber.version == 1
    assert same_bits(target, weights(0))
    del fetched[:]
    assert subscriber.poll(target, **options).version == 2
    assert fetched == ["delta:2:0"]
    assert same_bits(target, weights(1))


def test_in_place_a_delta_that_breaks_off_between_its_windows_is_reported(
    publisher, subscriber, monkeypatch, hasty
):
    monkeypatch.setattr(replica, "_WINDOW_BYTES", 1024)
    target = {"a": torch.zeros(20_000)}
    old = {"a": torch.randn(20_000)}
    publisher.publish(old)
    subscriber.poll(target, in_place=True)
    new = {"a": old["a"].clone()}
    new["a"][::8] += 1
    assert publisher.publish(new).kind == "delta"
    with monkeypatch.context() as patch:
        breaking(patch, redis.ConnectionError("broken"))
        with pytest.raises(WeightsTorn):
            subscriber.poll(target, in_place=True)
    assert subscriber.version is None
    assert subscriber.poll(target, in_place=True).version == 2
    assert same_bits(target, new)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_an_interrupt_in_mid_update_does_not_pass_for_the_old_version(
    publisher, subscriber, monkeypatch, error
):
    publisher.publish(weights(0))
    target = zeros()
    subscriber.poll(target, in_place=True)
    new = {name: tensor + 9 for name, tensor in weights().items()}
    publisher.publish(new)
    with monkeypatch.context() as patch:
        breaking(patch, error)
        with pytest.raises((type(error), RedrbError)):
            subscriber.poll(target, in_place=True)
    assert subscriber.version is None or same_bits(target, weights(0))
    assert subscriber.poll(target, in_place=True).version == 2
    assert same_bits(target, new)


def test_torn_is_mended_even_where_no_version_is_newer(publisher, subscriber, monkeypatch):
    publisher.publish(weights(0))
    target = zeros()
    with monkeypatch.context() as patch:
        breaking(patch, WeightCorrupt("damaged"))
        with pytest.raises(WeightsTorn):
            subscriber.poll(target, in_place=True)
    assert subscriber.poll(target, in_place=True).version == 1
    assert same_bits(target, weights(0))


def test_a_torn_model_is_mended_by_a_poll_that_is_not_in_place(publisher, subscriber, monkeypatch):
    target = on_version(publisher, subscriber, in_place=True)
    with monkeypatch.context() as patch:
        breaking(patch, WeightCorrupt("damaged"), after=0)
        with pytest.raises(WeightsTorn):
            subscriber.poll(target, in_place=True)
    assert subscriber.poll(target).version == 2
    assert same_bits(target, weights(1))


def contradict(client, namespace, version, **changes):
    manifests = prefix(namespace) + "manifests"
    fields = msgpack.unpackb(client.execute("HGET", manifests, version))
    client.execute("HSET", manifests, version, msgpack.packb(fields | changes))


READS = pytest.mark.parametrize(
    "read",
    [
        lambda subscriber, target: subscriber.poll(target),
        lambda subscriber, target: subscriber.poll(target, in_place=True),
        lambda subscriber, _: subscriber.fetch(),
    ],
    ids=["poll", "in place", "fetch"],
)


@READS
@pytest.mark.parametrize("chunks", [0, 6, 8])
def test_a_delta_of_another_size_than_its_base(
    client, namespace, publisher, subscriber, read, chunks
):
    """It says of itself that it has fewer chunks, or more, than the version that it stands on."""
    publisher.publish(weights(0))
    target = zeros()
    read(subscriber, target)
    new = weights(0) | {"a": weights(1)["a"]}  # the first chunk alone changes
    assert publisher.publish(new).kind == "delta"
    manifest = msgpack.unpackb(client.execute("HGET", prefix(namespace) + "manifests", 2))
    delta = manifest["delta"]
    contradict(
        client,
        namespace,
        2,
        nbytes=1024 * chunks,
        checksums=(manifest["checksums"] + bytes(8 * chunks))[: 8 * chunks],
        delta=delta
        | {
            "sizes": (delta["sizes"] + bytes(4 * chunks))[: 4 * chunks],
            "checksums": delta["checksums"] if chunks else b"",
        },
    )
    with pytest.raises((WeightError, DecodeError)):
        read(subscriber, target)


def test_an_update_in_place_that_cannot_be_finished_is_reported(client, namespace, monkeypatch):
    """Redis loses its data when some chunks are in the model already."""
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, deltas=False)
    subscriber = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    publisher.publish(weights(0))
    target = zeros()
    subscriber.poll(target, in_place=True)
    new = {name: tensor + 9 for name, tensor in weights().items()}
    publisher.publish(new)
    with monkeypatch.context() as patch:
        received = breaking(patch, ChunkGoneError("gone"))

        def forget(copy, original=InPlaceCopy.forget):
            lose_all(client, namespace)
            original(copy)

        patch.setattr(InPlaceCopy, "forget", forget)
        with pytest.raises(WeightsTorn, match="Nothing is published any more"):
            subscriber.poll(target, in_place=True)
        assert received
    assert subscriber.version is None
    with pytest.raises(WeightsTorn):
        subscriber.poll(target, in_place=True)
    again = redrb.WeightPublisher(client, "actor", namespace=namespace)
    assert again.publish(new).version == 1
    assert subscriber.poll(target, in_place=True).version == 1
    assert same_bits(target, new)
    assert subscriber.poll(target, in_place=True) is None


def test_late_commands_of_a_dead_connection_do_not_make_a_version_expire(
    client, namespace, monkeypatch
):
    sent = []

    def send(connection, parts, original=redrb.weights.wire.chunks._send):
        own = [bytes(part) for part in parts]
        sent.append(b"".join(own))
        original(connection, own)

    monkeypatch.setattr(redrb.weights.wire.chunks, "_send", send)
    redrb.WeightPublisher(client, "actor", namespace=namespace).publish(weights(0))
    chunks = [key for key in keys_of(client, namespace) if key.startswith("chunk:")]
    assert len(chunks) == len(sent) == 7
    for late in sent:
        with client.connection() as connection:
            connection.send_packed_command([late])
            assert read_reply(connection) is None
    assert {client.execute("TTL", prefix(namespace) + key) for key in chunks} == {-1}


@MODES
def test_into_another_model_all_is_loaded(publisher, subscriber, options):
    models = [nn.Linear(30, 40) for _ in range(3)]
    publisher.publish(models[0])
    for model in models[1:]:
        assert subscriber.poll(model, **options).version == 1
        assert same_bits(model.state_dict(), models[0].state_dict())
        assert subscriber.poll(model, **options) is None
    with torch.no_grad():
        models[0].weight[3, 4] += 1
    assert publisher.publish(models[0]).kind == "delta"
    assert subscriber.poll(models[1], **options).version == 2
    assert same_bits(models[1].state_dict(), models[0].state_dict())
    del models[1:]
    again = nn.Linear(30, 40)
    assert subscriber.poll(again, **options).version == 2
    assert same_bits(again.state_dict(), models[0].state_dict())


def test_a_version_that_is_no_adapter_says_so(publisher, subscriber):
    on_version(publisher, subscriber)  # the newest is a delta
    with pytest.raises(WeightError, match="version 2 of weights 'actor' is no adapter"):
        subscriber.adapter()


def test_two_threads_that_wait_for_each_other_are_reported(publisher, subscriber, monkeypatch):
    """One loads and waits for the lock; the other holds it and calls as well."""
    monkeypatch.setattr("redrb.weights.reading.loading.BUSY_S", 0.3)
    publisher.publish(weights(0))
    fetched, go_on = threading.Event(), threading.Event()
    plan = subscriber._loader.plan

    def planning(*arguments):
        fetched.set()
        assert go_on.wait(10)
        return plan(*arguments)

    subscriber._loader.plan = planning
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(subscriber.poll, zeros())
        assert fetched.wait(10)
        with subscriber.lock:
            go_on.set()
            with pytest.raises(ConfigError, match="must not hold"):
                subscriber.poll(zeros())
        assert loading.result(10).version == 1
