"""A load is complete or raises an error: models never hold a mixture unnoticed."""

import pytest
import torch
from torch import nn

from redrb import WeightPublisher
from redrb.errors import ConfigError, EncodeError, PublisherFenced, WeightMismatch
from redrb.weights import LoraConfig
from redrb.weights.publishing import upload
from redrb.weights.reading import targets
from redrb.weights.wire import stored_keys
from tests.published import check_nothing_left

CONFIG = {"0": LoraConfig(r=2, lora_alpha=2), "1": LoraConfig(r=2, lora_alpha=2)}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def adapter(*layers):
    tensors = {}
    for layer in layers:
        tensors |= {f"{layer}.lora_A": torch.ones(2, 4), f"{layer}.lora_B": torch.ones(4, 2)}
    return tensors, {layer: CONFIG[layer] for layer in layers}


@pytest.mark.parametrize("strict", [True, "model", False])
def test_an_adapter_is_never_left_out(publisher, subscriber, strict):
    whole = model()
    publisher.publish(whole)
    publisher.publish_lora(adapter("0"))
    with pytest.raises(WeightMismatch):
        subscriber.poll({"0.weight": torch.zeros(4, 4)}, strict=strict)
    assert subscriber.version is None


def test_in_place_refuses_an_adapter_before_anything_changes(publisher, subscriber):
    target = model()
    publisher.publish(target)
    subscriber.poll(target, in_place=True)
    before = [parameter.clone() for parameter in target.parameters()]
    publisher.publish({name: tensor + 1 for name, tensor in target.state_dict().items()})
    publisher.publish_lora(adapter("0"))
    with pytest.raises(ConfigError, match="in_place"):
        subscriber.poll(target, in_place=True)
    assert subscriber.version == 1
    assert all(map(torch.equal, before, target.parameters()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_load_that_breaks_off_has_no_version(publisher, subscriber, monkeypatch, error):
    target = model()
    publisher.publish(target)
    subscriber.poll(target)
    newer = {name: tensor + 1 for name, tensor in target.state_dict().items()}
    publisher.publish(newer)
    load, loaded = targets.load_in_place, []

    def break_off(*arguments):
        if loaded:
            raise error
        loaded.append(load(*arguments))

    monkeypatch.setattr(targets, "load_in_place", break_off)
    with pytest.raises(error):
        subscriber.poll(target)
    assert subscriber.version is None
    monkeypatch.undo()
    assert subscriber.poll(target).version == 2
    assert all(torch.equal(tensor, newer[name]) for name, tensor in target.state_dict().items())


def test_a_layer_that_the_newest_adapter_lacks_has_its_base_weights(publisher, subscriber):
    target = model()
    base = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    publisher.publish_lora(adapter("0", "1"))
    subscriber.poll(target)
    publisher.publish_lora(adapter("0"))
    subscriber.poll(target)
    assert torch.equal(target[0].weight, base["0.weight"] + 2)
    assert torch.equal(target[1].weight, base["1.weight"])


def test_a_server_that_lost_the_last_second_does_not_fence_its_publisher(
    client, namespace, publisher, subscriber, monkeypatch
):
    fence = f"redrb:{{{namespace}:weights:actor}}:fence"
    publisher.publish({"a": torch.zeros(3)})
    send, lost = upload.upload, []

    def lose_the_token(*arguments, **options):
        send(*arguments, **options)
        if not lost:
            lost.append(client.execute("HINCRBY", fence, "token", -1))

    monkeypatch.setattr(upload, "upload", lose_the_token)
    assert publisher.publish({"a": torch.ones(3)}).version == 2
    assert subscriber.fetch()["a"].tolist() == [1.0] * 3


def test_tensors_that_change_meanwhile_spoil_no_later_version(publisher, subscriber, monkeypatch):
    state = {"a": torch.zeros(1000)}
    commit = publisher._committer.commit

    def change(*arguments):
        state["a"][3] += 1
        return commit(*arguments)

    monkeypatch.setattr(publisher._committer, "commit", change)
    publisher.publish(state)
    monkeypatch.undo()
    target = {"a": torch.ones(1000)}
    for _ in range(3):
        state["a"][7] += 1
        publisher.publish(state)
        subscriber.poll(target)
        assert torch.equal(target["a"], state["a"])


CHANGES = {
    "by torch": lambda tensor: tensor.add_(1),
    "past torch's count": lambda tensor: tensor.data.view(-1)[:8].add_(1),
}


CASES = [
    (kind, published, how)
    for kind in ("full", "delta", "full, deltas=False", "anchor")
    for published in ("bfloat16", "float32", "cast", "strided", "adapter")
    for how in CHANGES
    if (kind == "full" or published != "adapter")
    # of a tensor that is not contiguous a copy is sent, of which nobody knows that it is a mixture
    and (published != "strided" or how == "by torch")
]


@pytest.mark.parametrize(("kind", "published", "how"), CASES, ids=map(", ".join, CASES))
@pytest.mark.parametrize("place", ["before the first chunk", "after the first", "after the last"])
def test_tensors_that_change_while_they_are_sent_are_not_published(
    client, namespace, subscriber, monkeypatch, small_chunks, kind, published, place, how
):
    options = {
        "deltas": kind != "full, deltas=False",
        "anchor_every": 1 if kind == "anchor" else 25,
    }
    dtype = "bfloat16" if published == "cast" else None
    publisher = WeightPublisher(client, "actor", namespace=namespace, dtype=dtype, **options)
    made = torch.bfloat16 if published == "bfloat16" else torch.float32
    state = {"a": torch.randn(3000).to(made), "b": torch.randn(3000).to(made)}
    if published == "strided":
        state["b"] = torch.randn(30, 100).t()
    publish = publisher.publish
    if published == "adapter":
        state = {"0.lora_A": torch.randn(8, 300), "0.lora_B": torch.randn(300, 8)}
        config = {"0": LoraConfig(r=8, lora_alpha=8)}
        publish = lambda tensors: publisher.publish_lora((tensors, config))  # noqa: E731
    before = publish(state)
    kept = subscriber.fetch(before.version)
    for tensor in state.values():
        tensor.view(-1)[:9].add_(1) if tensor.is_contiguous() else tensor[:9].add_(1)
    last = list(state.values())[-1]

    def send(client, values, *, original=upload.upload, **given):
        def changing():
            if place == "before the first chunk":
                CHANGES[how](last)
            for number, value in enumerate(values):
                yield value
                if not number and place == "after the first":
                    CHANGES[how](last)

        original(client, changing(), **given)
        if place == "after the last":
            CHANGES[how](last)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "upload", send)
        if kind == "full":
            publisher._baseline.forget()
        with pytest.raises(EncodeError, match=r"changed while it was published"):
            publish(state)
    assert subscriber.latest() == before
    again = subscriber.fetch()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    later = publish(state)
    fetched = subscriber.fetch(later.version)
    for name, tensor in state.items():
        assert torch.equal(fetched[name], tensor.to(fetched[name].dtype))
    if published != "adapter":
        check_nothing_left(client, namespace)


@pytest.mark.parametrize("was_told", [False, True])
def test_a_fenced_publisher_stays_fenced_when_the_data_are_lost(
    client, namespace, publisher, subscriber, was_told
):
    later = WeightPublisher(client, "actor", namespace=namespace)
    later.publish({"a": torch.zeros(3)})
    if was_told:
        with pytest.raises(PublisherFenced):
            publisher.publish({"a": torch.full((3,), 7.0)})
    client.execute("DEL", *client.execute("KEYS", f"redrb:{{{namespace}:weights:actor}}:*"))
    if was_told:
        with pytest.raises(PublisherFenced):
            publisher.publish({"a": torch.full((3,), 7.0)})
        assert subscriber.latest() is None
    else:
        publisher.publish({"a": torch.full((3,), 7.0)})  # it cannot know that it was replaced
    assert later.publish({"a": torch.ones(3)}).version == 2
    with pytest.raises(PublisherFenced):
        publisher.publish({"a": torch.full((3,), 7.0)})
    assert subscriber.fetch()["a"].tolist() == [1.0] * 3


def test_the_later_owner_commits_what_it_has_staged_when_an_earlier_one_came_first(
    client, namespace, publisher, subscriber, monkeypatch
):
    later = WeightPublisher(client, "actor", namespace=namespace)
    send, lost = upload.upload, []

    def lose_the_data(*arguments, **options):
        send(*arguments, **options)
        if not lost:
            lost.append(client.execute("KEYS", f"redrb:{{{namespace}:weights:actor}}:*"))
            client.execute("DEL", *lost[0])
            publisher.publish({"a": torch.full((3,), 7.0)})

    monkeypatch.setattr(upload, "upload", lose_the_data)
    assert later.publish({"a": torch.ones(3)}).version == 2
    assert subscriber.fetch()["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("lost", ["token", "versions too"])
def test_keys_of_an_attempt_whose_token_is_given_again_are_left_alone(
    client, namespace, subscriber, lost
):
    """A failover has lost the last token; chunks lie on other nodes, or came before it."""
    before = "redrb:{" + f"{namespace}:weights:actor" + "}:"
    first = WeightPublisher(client, "actor", namespace=namespace, deltas=False, keep=9)
    first.publish({"a": torch.zeros(3)})
    first.publish({"a": torch.full((3,), 7.0)})
    client.execute("HSET", f"{before}fence", "token", 0)
    if lost == "versions too":
        client.execute("DEL", f"{before}versions", f"{before}manifests")
    kept = {key: client.execute("GET", key) for key in client.execute("KEYS", f"{before}chunk:*")}
    later = WeightPublisher(client, "actor", namespace=namespace, deltas=False, keep=9)
    published = later.publish({"a": torch.ones(3)})
    assert subscriber.fetch(published.version)["a"].tolist() == [1.0] * 3
    assert {key: client.execute("GET", key) for key in kept} == kept


@pytest.mark.parametrize("small", [True, False], ids=["a state", "a delta"])
def test_keys_that_appear_while_a_version_is_staged_are_not_taken_for_its_own(
    client, namespace, subscriber, monkeypatch, small
):
    """Another publisher, which a failover has given the same token, stores its chunks meanwhile."""
    publisher = WeightPublisher(client, "actor", namespace=namespace, deltas=small)
    state = {"a": torch.zeros(3000)}
    publisher.publish(state)
    before = "redrb:{" + f"{namespace}:weights:actor" + "}:"
    count, foreign = stored_keys.count_existing, {}

    def look(where, names):
        names = list(names)
        found = count(where, names)
        if not foreign:
            foreign[names[0]] = b"of another publisher"
            client.execute("SET", names[0], foreign[names[0]])
        return found

    monkeypatch.setattr(stored_keys, "count_existing", look)
    state["a"][:2] = 1.0
    published = publisher.publish(state)
    assert torch.equal(subscriber.fetch(published.version)["a"], state["a"])
    [(key, value)] = foreign.items()
    assert key.startswith(f"{before}{'delta' if small else 'chunk'}:")
    assert client.execute("GET", key) == value
