"""Versions in full and as deltas: when each is sent, which bytes are sent, which keys stay."""

import pytest
import torch

from redrb.errors import ConfigError, EncodeError, PublisherFenced, StoreUnavailable, WeightError
from redrb.weights.publishing import committer, upload
from redrb.weights.wire.calls import Commit
from tests.published import check_nothing_left, lose_all, prefix, stored_keys

ELEMENTS = 4096  # bfloat16: 8 chunks


pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def sent(monkeypatch):
    """Keys that are sent, without prefix, and how many bytes."""
    found = []

    def noted(values):
        for value in values:
            found.append((value.key.partition("}:")[2], value.nbytes))
            yield value

    def send(client, values, *, original=upload.upload, **options):
        original(client, noted(values), **options)

    monkeypatch.setattr(upload, "upload", send)
    return found


def weights(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return {"a": torch.randn(ELEMENTS).to(dtype)}


def nudge(state, count=40):
    """Change the first `count` elements by one unit in the last place."""
    state["a"].view(torch.int16 if state["a"].itemsize == 2 else torch.int32)[:count] += 1


def kinds(publisher, state, changes):
    """Publish once before and once after each change; return the kinds."""
    found = [publisher.publish(state).kind]
    for change in changes:
        change(state)
        found.append(publisher.publish(state).kind)
    return found


def test_the_first_version_is_full_and_small_changes_are_deltas(make, subscriber, sent):
    publisher, state = make(), weights()
    assert publisher.publish(state).kind == "full"
    assert sent == [(f"chunk:1:{index}", 1024) for index in range(8)]
    del sent[:]
    nudge(state)
    published = publisher.publish(state)
    assert (published.kind, published.base, published.nbytes) == ("delta", 1, 8192)
    assert sent == [("delta:2:0", published.delta_bytes)]
    assert 0 < published.delta_bytes == published.stored_bytes < 200
    assert subscriber.versions()[-1] == published


def test_nothing_changed_is_a_delta_of_no_bytes(make, subscriber, sent, client, namespace):
    publisher, state = make(), weights()
    publisher.publish(state)
    del sent[:]
    published = publisher.publish(state)
    assert (published.kind, published.delta_bytes, published.stored_bytes) == ("delta", 0, 0)
    assert sent == []
    assert torch.equal(subscriber.fetch()["a"], state["a"])
    check_nothing_left(client, namespace)


def test_much_changed_is_full_without_a_delta(make):
    publisher, state = make(), weights()
    publisher.publish(state)
    state["a"].view(torch.uint8).random_(0, 256)
    published = publisher.publish(state)
    assert (published.kind, published.base, published.delta_bytes) == ("full", 0, None)
    assert published.stored_bytes == published.nbytes == 8192


@pytest.mark.parametrize("share", [0.30, 0.40])
def test_a_delta_is_at_most_35_percent_of_the_state(make, share):
    publisher, state = make(), weights()
    publisher.publish(state)
    raw = state["a"].view(torch.uint8)
    raw[: int(8192 * share)].random_(0, 256)  # noise does not shrink
    published = publisher.publish(state)
    assert published.kind == ("delta" if share < 0.35 else "full")


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(ELEMENTS, dtype=torch.bfloat16)},
        {"a": torch.zeros(ELEMENTS + 1, dtype=torch.bfloat16)},
        {"a": torch.zeros(2, ELEMENTS // 2, dtype=torch.bfloat16)},
        {"a": torch.zeros(ELEMENTS, dtype=torch.float16)},
        {"a": torch.zeros(ELEMENTS, dtype=torch.bfloat16), "b": torch.zeros(1)},
    ],
    ids=["name", "size", "shape", "dtype", "one more"],
)
def test_other_tensors_are_full_and_deltas_go_on_from_there(make, subscriber, other):
    publisher = make()
    publisher.publish(weights())
    assert publisher.publish(other).kind == "full"
    assert publisher.publish(other).kind == "delta"
    assert subscriber.fetch().keys() == other.keys()


def test_every_so_manyth_is_an_anchor_that_has_a_delta_too(make, subscriber):
    publisher, state = make(anchor_every=4), weights()
    found = []
    for _ in range(9):
        nudge(state)
        found.append(publisher.publish(state))
    assert [v.kind for v in found] == ["full", *["delta"] * 3, "full", *["delta"] * 3, "full"]
    anchor = found[4]
    assert 0 < anchor.delta_bytes < 200
    assert anchor.stored_bytes == anchor.nbytes + anchor.delta_bytes
    assert anchor.base == 0
    assert make(anchor_every=1).publish(state).kind == "full"


def test_a_full_version_in_between_puts_the_anchor_off(make):
    publisher, state = make(anchor_every=3), weights()
    changes = [nudge, lambda s: s["a"].view(torch.uint8).random_(), nudge, nudge, nudge]
    assert kinds(publisher, state, changes) == ["full", "delta", "full", "delta", "delta", "full"]


def test_without_deltas_all_are_full(make):
    publisher, state = make(deltas=False), weights()
    assert kinds(publisher, state, [nudge] * 3) == ["full"] * 4


def test_after_another_publisher_all_is_sent(make, subscriber):
    first, state = make(), weights()
    assert kinds(first, state, [nudge]) == ["full", "delta"]
    second = make()
    assert kinds(second, state, [nudge]) == ["full", "delta"]
    with pytest.raises(PublisherFenced):
        first.publish(state)
    third = make()
    assert third.publish(state).kind == "full"
    assert torch.equal(subscriber.fetch()["a"], state["a"])


def test_after_the_server_was_emptied_all_is_sent(make, subscriber, client, namespace):
    publisher, state = make(), weights()
    target = {"a": torch.zeros_like(state["a"])}
    kinds(publisher, state, [nudge])
    subscriber.poll(target)
    lose_all(client, namespace)
    nudge(state)
    published = publisher.publish(state)
    assert (published.kind, published.version) == ("full", 3)
    assert subscriber.poll(target).version == 3
    assert torch.equal(target["a"], state["a"])
    nudge(state)
    assert publisher.publish(state).kind == "delta"
    check_nothing_left(client, namespace)


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_version_is_no_base(make, subscriber, client, namespace, monkeypatch, after):
    """A commit that nobody heard of: the next version stands on what Redis says is the newest."""
    publisher, state = make(), weights()
    publisher.publish(state)
    nudge(state)

    def commit(*arguments, original=committer.run):
        if not isinstance(arguments[2], Commit):
            return original(*arguments)
        if after:
            original(*arguments)
        raise StoreUnavailable("lost", where="there", uncertain=True)

    with monkeypatch.context() as patch:
        patch.setattr(committer, "run", commit)
        with pytest.raises(StoreUnavailable):
            publisher.publish(state)
    nudge(state, 60)
    published = publisher.publish(state)
    assert (published.kind, published.version) == (("full", 3) if after else ("delta", 2))
    assert torch.equal(subscriber.fetch()["a"], state["a"])
    check_nothing_left(client, namespace)


def test_a_refused_publish_changes_nothing(make, subscriber, client, namespace, monkeypatch):
    publisher, state = make(), weights()
    publisher.publish(state)
    with pytest.raises(ConfigError):
        publisher.publish(state, version=1)
    with pytest.raises(EncodeError):
        publisher.publish({"a": 1})

    def interrupted(*arguments, original=upload.upload, **options):
        original(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload", interrupted)
        nudge(state)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(state)
    assert publisher.publish(state).kind == "delta"
    assert torch.equal(subscriber.fetch()["a"], state["a"])
    check_nothing_left(client, namespace)


def test_floats_are_cast_before_the_difference(make, subscriber):
    state = weights(torch.float32) | {"steps": torch.tensor([1]), "c": torch.zeros(3).double()}
    publisher = make(dtype="bfloat16")
    assert publisher.publish(state).nbytes == 8192 + 64 + 64
    state["a"] += 1e-6  # of which bfloat16 sees little
    published = publisher.publish(state)
    assert published.kind == "delta"
    fetched = subscriber.fetch()
    assert torch.equal(fetched["a"], state["a"].bfloat16())
    assert (fetched["steps"].dtype, fetched["c"].dtype) == (torch.int64, torch.bfloat16)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    subscriber.poll(live)
    assert torch.equal(live["a"], state["a"].bfloat16().float())


@pytest.mark.parametrize("name", ["anchor_every", "keep", "max_bytes"])
@pytest.mark.parametrize("number", [0, -1, True, 1.5])
def test_numbers_are_positive_integers(make, name, number):
    with pytest.raises(ConfigError, match=name):
        make(**{name: number})


@pytest.mark.parametrize("deltas", [True, False])
def test_frozen_chunks_are_sent_once(make, subscriber, client, namespace, sent, deltas):
    publisher = make(anchor_every=2, keep=1, deltas=deltas)
    frozen = {"frozen": torch.arange(1024, dtype=torch.int64)}
    state = frozen | {"a": torch.zeros(500)}
    publisher.publish(state)
    assert len(sent) == 8 + 2
    for value in range(1, 7):
        del sent[:]
        state["a"][:value] = value
        published = publisher.publish(state)
        chunks = [key for key, _ in sent if key.startswith("chunk:")]
        if published.kind == "full":
            assert chunks == [f"chunk:{published.version}:8"]  # one of both that hold `a`
        else:
            assert chunks == []
        fetched = subscriber.fetch()
        assert all(torch.equal(fetched[name], state[name]) for name in state)
        check_nothing_left(client, namespace)
    assert "chunk:1:0" in stored_keys(client, namespace)
    state["frozen"].random_()
    assert publisher.publish(state).kind == "full"
    publisher.publish(state | {"b": torch.zeros(1)})
    check_nothing_left(client, namespace)


def test_a_shared_chunk_that_is_gone_is_sent_again(make, subscriber, client, namespace, sent):
    publisher, state = make(anchor_every=1, keep=1), weights()
    publisher.publish(state)
    client.execute("DEL", prefix(namespace) + "chunk:1:3")
    nudge(state)
    assert publisher.publish(state).version == 2
    assert torch.equal(subscriber.fetch()["a"], state["a"])
    check_nothing_left(client, namespace)


@pytest.mark.parametrize("kind", ["chunk", "delta"])
def test_chunks_that_vanish_at_each_attempt_are_reported(
    make, client, namespace, monkeypatch, kind
):
    publisher, state = make(), weights()
    if kind == "delta":
        publisher.publish(state)
        nudge(state)

    def send(client, values, *, original=upload.upload, **options):
        original(client, values, **options)
        lost = [key for key in stored_keys(client, namespace) if not key.startswith("chunk:1:")]
        client.execute("DEL", prefix(namespace) + (lost or ["chunk:1:0"])[0])

    monkeypatch.setattr(upload, "upload", send)
    with pytest.raises(WeightError, match="gone at the commit"):
        publisher.publish(state)
    check_nothing_left(client, namespace)
