"""Adapters from publisher to readers: loaded into LoRA layers, or merged into weights."""

import pytest
import torch
from torch import nn

import redrb
from redrb.errors import (
    ConfigError,
    EncodeError,
    WeightCorrupt,
    WeightError,
    WeightMismatch,
)
from redrb.weights.lora.merging import merged
from redrb.weights.reading import catalogue
from redrb.weights.wire.lora_config import LoraConfig
from tests.published import CHUNK_BYTES, Lora, check_nothing_left, keys_of, prefix


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(CHUNK_BYTES, 1024)
    monkeypatch.setattr("redrb.weights.reading.shared_copy._SHARED_MEMORY", tmp_path)


def plain(seed):
    """The model without LoRA."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"first": nn.Linear(9, 30, bias=False), "other": nn.Linear(30, 4), "last": nn.Linear(4, 9)}
    )


def adapted(seed, base=None):
    """The same model with LoRA in two layers."""
    model = plain(seed) if base is None else base
    torch.manual_seed(seed + 100)
    return nn.ModuleDict(
        {"first": Lora(model["first"]), "other": model["other"], "last": Lora(model["last"], r=1)}
    )


def check_merged(model, base, adapter):
    """Check that `model` has the weights of `base` with the LoRA of `adapter`, bit by bit."""
    for name in ("first", "last"):
        lora = adapter[name]
        config = LoraConfig(lora.r, lora.lora_alpha)
        wanted = merged(base[name].weight, lora.lora_A, lora.lora_B, config)
        assert torch.equal(model[name].weight, wanted)
    assert torch.equal(model["other"].weight, base["other"].weight)


READERS = pytest.mark.parametrize("host_cache", [False, True], ids=["private copy", "host cache"])


@READERS
def test_an_adapter_is_merged_into_the_weights_that_it_belongs_to(
    client, namespace, publisher, host_cache
):
    reader = redrb.WeightSubscriber(client, "actor", namespace=namespace, host_cache=host_cache)
    base, model = plain(1), plain(2)
    publisher.publish(base)
    reader.poll(model)
    for seed in (3, 4, 5):  # the product of the one before is not in it any more
        published = publisher.publish_lora(adapted(seed))
        assert (published.kind, published.base, published.tensors) == ("lora", 1, 4)
        assert published.stored_bytes == published.nbytes < 1500
        assert published.delta_bytes is None
        assert reader.poll(model) == published
        check_merged(model, base, adapted(seed))
    late, own = plain(6), redrb.WeightSubscriber(client, "actor", namespace=namespace)
    assert own.poll(late).version == 4
    check_merged(late, base, adapted(5))
    check_nothing_left(client, namespace)


@pytest.mark.parametrize(("host_cache", "whole"), [(False, True), (True, False)])
def test_compiled_models_read_and_publish_as_plain_ones(
    client, namespace, publisher, host_cache, whole
):
    def compiled(module):
        return torch.compile(module, backend="eager")

    def wrapped(model):
        if whole:
            return compiled(model)
        return nn.ModuleDict({name: compiled(layer) for name, layer in model.items()})

    reader = redrb.WeightSubscriber(client, "actor", namespace=namespace, host_cache=host_cache)
    base, model = plain(1), plain(2)
    for seed in (3, 4):
        with torch.no_grad():
            base["first"].weight[0, seed] += 1
        publisher.publish(wrapped(base))
        reader.poll(wrapped(model) if seed == 3 else model)
        assert torch.equal(model["first"].weight, base["first"].weight)
        publisher.publish_lora(wrapped(adapted(seed)))
        reader.poll(wrapped(model))
        check_merged(model, base, adapted(seed))
    assert list(reader.adapter().configs) == ["first", "last"]


def test_full_versions_and_adapters_alternate(client, namespace, publisher, subscriber):
    base, model = plain(1), plain(2)
    for step in range(12):
        if step % 3 == 2 or step == 0:
            with torch.no_grad():
                base["other"].weight[0, step] += 1
            assert publisher.publish(base).kind == ("full" if step == 0 else "delta")
            newest = None
        else:
            newest = adapted(step)
            publisher.publish_lora(newest)
        if step % 4 != 1:  # else it skips one
            subscriber.poll(model)
            if newest is None:
                assert torch.equal(model["first"].weight, base["first"].weight)
                assert torch.equal(model["other"].weight, base["other"].weight)
            else:
                check_merged(model, base, newest)
        check_nothing_left(client, namespace)


def test_only_new_chunks_are_fetched(publisher, subscriber, monkeypatch):
    fetched = []

    def fetch(client, values, *, original=catalogue.fetch):
        fetched.extend(value.key.partition("}:")[2] for value in values)
        original(client, values)

    monkeypatch.setattr(catalogue, "fetch", fetch)
    base, model = plain(1), plain(2)
    publisher.publish(base)
    subscriber.poll(model)
    publisher.publish_lora(adapted(3))
    del fetched[:]
    subscriber.poll(model)
    assert {key.rpartition(":")[0] for key in fetched} == {"chunk:2"}
    with torch.no_grad():
        base["first"].weight[0, 0] += 1
    publisher.publish(base)
    del fetched[:]
    assert subscriber.poll(model).kind == "delta"
    assert fetched == ["delta:3:0"]
    assert torch.equal(model["first"].weight, base["first"].weight)


def test_layers_with_lora_are_loaded(publisher, subscriber):
    base = plain(1)
    trained, made = adapted(3, base), adapted(4)
    publisher.publish(trained)
    subscriber.poll(made)
    with torch.no_grad():
        trained["first"].lora_B += 1
        trained["last"].lora_A += 1
    publisher.publish_lora(trained)
    subscriber.poll(made)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name


def test_without_published_weights_an_adapter_is_merged_into_the_readers_weights(
    client, namespace, publisher, subscriber
):
    model = plain(2)
    own = plain(2)
    for seed in (3, 4):
        assert publisher.publish_lora(adapted(seed)).base == 0
        assert subscriber.poll(model).version == seed - 2
        check_merged(model, own, adapted(seed))
    here = adapted(7)
    late = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    assert late.poll(here, in_place=True).version == 2
    assert torch.equal(here["first"].lora_A, adapted(4)["first"].lora_A)
    check_nothing_left(client, namespace)


def test_the_base_of_a_kept_adapter_is_kept(client, namespace, subscriber):
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=1)
    base = plain(1)
    publisher.publish(base)
    with torch.no_grad():
        base["other"].bias += 1
    publisher.publish(base)
    for seed in range(3, 9):
        publisher.publish_lora(adapted(seed))
    assert [(v.version, v.kind) for v in subscriber.versions()] == [
        (1, "full"), (2, "delta"), (8, "lora"),
    ]  # fmt: skip
    model = plain(9)
    subscriber.poll(model)
    check_merged(model, base, adapted(8))
    assert torch.equal(model["other"].bias, base["other"].bias)
    torch.manual_seed(0)
    publisher.publish(plain(10))
    assert [v.version for v in subscriber.versions()] == [9]
    check_nothing_left(client, namespace)


def test_several_models_by_name(publisher, subscriber):
    actor, critic = plain(1), plain(2)
    publisher.publish({"actor": actor, "critic": critic})
    lora = adapted(3)
    tensors = {
        f"actor.{name}.lora_{half}": getattr(lora[name], f"lora_{half}")
        for name in ("first", "last")
        for half in "AB"
    }
    configs = {f"actor.{name}": LoraConfig(lora[name].r, 8.0) for name in ("first", "last")}
    publisher.publish_lora((tensors, configs))
    models = {"actor": plain(5), "critic": plain(6)}
    assert subscriber.poll(models).version == 2
    check_merged(models["actor"], actor, lora)
    assert torch.equal(models["critic"]["first"].weight, critic["first"].weight)


def test_an_adapter_for_engines(publisher, subscriber):
    publisher.publish(plain(1))
    with pytest.raises(WeightError, match="no adapter"):
        subscriber.adapter()
    lora = adapted(3)
    publisher.publish_lora(lora)
    publisher.publish_lora(adapted(4))
    for found, wanted in ((subscriber.adapter(2), lora), (subscriber.adapter(), adapted(4))):
        assert list(found.tensors) == [
            "first.lora_A", "first.lora_B", "last.lora_A", "last.lora_B",
        ]  # fmt: skip
        assert torch.equal(found.tensors["last.lora_B"], wanted["last"].lora_B)
        assert found.configs == {"first": LoraConfig(2, 8.0), "last": LoraConfig(1, 8.0)}
    with pytest.raises(WeightError, match="no adapter"):
        subscriber.adapter(1)
    with pytest.raises(WeightError, match="no version 9"):
        subscriber.adapter(9)
    assert list(subscriber.fetch()) == list(subscriber.adapter().tensors)
    assert subscriber.version is None


def test_a_dict_that_has_a_and_b_gets_them(publisher, subscriber):
    lora = adapted(3)
    publisher.publish_lora(lora)
    with pytest.raises(WeightMismatch, match="merged"):
        subscriber.poll({"first.weight": torch.zeros(30, 9)})
    wrong = {name: torch.zeros(3, 3) for name in subscriber.fetch()}
    with pytest.raises(WeightMismatch, match="in the dict"):
        subscriber.poll(wrong)
    live = {name: torch.zeros_like(tensor) for name, tensor in subscriber.fetch().items()}
    assert subscriber.poll(live).version == 1
    assert torch.equal(live["first.lora_B"], lora["first"].lora_B)


def test_a_model_without_layers_has_no_adapter(client, namespace, publisher):
    before = keys_of(client, namespace)
    with pytest.raises(ConfigError, match="no LoRA layers"):
        publisher.publish_lora(plain(1))
    with pytest.raises(ConfigError, match="no LoRA layers"):
        publisher.publish_lora(({}, {}))
    with pytest.raises(EncodeError, match="r=4"):
        publisher.publish_lora(
            (
                {"0.lora_A": torch.ones(8, 16), "0.lora_B": torch.ones(16, 8)},
                {"0": LoraConfig(4, 4.0)},
            )
        )
    assert keys_of(client, namespace) == before


def test_another_adapter_after_one_that_did_not_fit(publisher, subscriber):
    base, model = plain(1), plain(2)
    publisher.publish(base)
    publisher.publish_lora(adapted(3))
    subscriber.poll(model)
    publisher.publish_lora(({"no.lora_A": torch.ones(1, 2), "no.lora_B": torch.ones(2, 1)},
                            {"no": LoraConfig(1, 1.0)}))  # fmt: skip
    with pytest.raises(WeightMismatch):
        subscriber.poll(model)
    check_merged(model, base, adapted(3))
    publisher.publish_lora(adapted(4))
    subscriber.poll(model)
    check_merged(model, base, adapted(4))


def test_a_damaged_adapter_is_not_loaded(client, namespace, publisher, subscriber):
    base, model = plain(1), plain(2)
    publisher.publish(base)
    publisher.publish_lora(adapted(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    client.execute("SETRANGE", prefix(namespace) + "chunk:2:0", 5, b"xx")
    with pytest.raises(WeightCorrupt):
        subscriber.poll(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    publisher.publish_lora(adapted(4))
    assert subscriber.poll(model).version == 3
    check_merged(model, base, adapted(4))


def test_a_closed_publisher_publishes_nothing_more(publisher, subscriber):
    state = {"a.weight": torch.ones(8, 8)}
    publisher.publish(state)
    publisher.close()
    adapter = {"a.lora_A": torch.ones(2, 8), "a.lora_B": torch.ones(8, 2)}
    for call in (
        lambda: publisher.publish(state),
        lambda: publisher.publish_lora((adapter, {"a": LoraConfig(2, 4.0)})),
    ):
        with pytest.raises(ConfigError, match="was closed"):
            call()
    assert subscriber.latest().version == 1
