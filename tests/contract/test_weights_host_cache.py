"""Models in a host's shared memory: one version each, which changes only when they poll."""

import gc
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import redrb
from redrb.errors import ConfigError, StoreUnavailable, WeightCorrupt, WeightError
from redrb.weights.host import locks, versions
from redrb.weights.host.versions import HostVersions
from redrb.weights.reading import catalogue, shared_copy
from redrb.weights.wire.chunks import ChunkGoneError
from tests.disks import fill, small_disk
from tests.published import (
    CHUNK_BYTES,
    Lora,
    bits,
    copied,
    keys_of,
    lose_all,
    prefix,
    same_bits,
)

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(CHUNK_BYTES, 1024)
    monkeypatch.setattr(shared_copy, "_SHARED_MEMORY", tmp_path)


@pytest.fixture
def subscribe(client, namespace):
    """Make subscribers that share the host's memory, as in processes of their own."""
    return lambda: redrb.WeightSubscriber(client, "actor", namespace=namespace, host_cache=True)


class Model(nn.Module):
    """Parameters, tied ones, and buffers of several dtypes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(40, 20)
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
        self.brain = nn.Parameter(torch.randn(30, 30).bfloat16())
        self.head = nn.Linear(20, 40)
        self.head.weight = self.embedding.weight

    def forward(self, numbers):
        return self.head(self.layers(self.embedding(numbers))) + self.brain.sum()


def state(model):
    return copied(dict(model.state_dict()))


def tensors(model):
    return [*model.parameters(), *model.buffers()]


def change(model, dice):
    """Change some elements of some tensors; without changing how many there are."""
    with torch.no_grad():
        for tensor in dice.sample(tensors(model), 3):
            tensor.view(-1)[dice.randrange(tensor.numel())] += dice.randrange(1, 9)


def mappings():
    """What this process has mapped of files: (addresses, permissions, inode, path)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            yield range(begin, end), fields[1], int(fields[4]), fields[5]


def inode(tensor, directory):
    """The file under `directory` that a tensor's elements are in, if they are."""
    for addresses, permissions, number, path in mappings():
        if tensor.data_ptr() in addresses and path.startswith(str(directory)):
            assert permissions[-1] == "p"  # writes stay here
            return number
    return None


def inodes(model, directory):
    return {inode(tensor, directory) for tensor in tensors(model)}


def test_models_share_one_memory_and_written_pages_are_private(publisher, subscribe, tmp_path):
    source, dice = Model(1), random.Random(1)
    publisher.publish(source)
    models = [Model(seed) for seed in range(2, 5)]
    readers = [subscribe() for _ in models]
    parameters = [dict(model.named_parameters()) for model in models]
    for reader, model in zip(readers, models, strict=True):
        assert reader.poll(model).version == 1
        assert same_bits(state(model), state(source))
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert model.head.weight is model.embedding.weight
    assert len(inodes(models[0], tmp_path)) == 1
    assert None not in inodes(models[0], tmp_path)
    assert all(inodes(model, tmp_path) == inodes(models[0], tmp_path) for model in models)
    mine, *others = models
    mine(torch.tensor([1, 2, 3])).sum().backward()
    assert all(parameter.grad is not None for parameter in mine.parameters())
    with torch.no_grad():
        for tensor in tensors(mine):
            tensor.zero_()
    for model in others:
        assert same_bits(state(model), state(source))
    late = Model(9)
    subscribe().poll(late)
    assert same_bits(state(late), state(source))
    change(source, dice)
    publisher.publish(source)
    for reader, model, known in zip(readers, models, parameters, strict=True):
        assert reader.poll(model).version == 2
        assert same_bits(state(model), state(source))
        assert all(known[name] is now for name, now in model.named_parameters())
    assert inodes(late, tmp_path) != inodes(mine, tmp_path)


def test_every_version_is_right_while_some_skip_and_keep_theirs(publisher, subscribe):
    last, history, problems = 40, {}, []
    source, dice = Model(1), random.Random(2)

    def follow(seed):
        random_, reader, model, have = random.Random(seed), subscribe(), Model(seed), None
        try:
            while have is None or have < last:
                time.sleep(random_.random() * (0.1 if seed < 5 else 0.005))
                if have is not None and not same_bits(state(model), history[have]):
                    problems.append(f"{seed}: version {have} changed while it was used")
                found = reader.poll(model)
                have = have if found is None else found.version
                if have is not None and not same_bits(state(model), history[have]):
                    problems.append(f"{seed}: version {have} is another one")
        except Exception as error:  # noqa: BLE001  shown by the assertion
            problems.append(repr(error))

    threads = [threading.Thread(target=follow, args=(seed,)) for seed in range(3, 8)]
    for thread in threads:
        thread.start()
    for version in range(1, last + 1):
        change(source, dice)
        history[version] = state(source)
        publisher.publish(source)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []


def test_a_model_outlives_its_subscriber(publisher, subscribe, tmp_path):
    source, dice = Model(1), random.Random(4)
    publisher.publish(source)
    reader, model = subscribe(), Model(2)
    reader.poll(model)
    before = state(model)
    weight = model.embedding.weight.data[3:]
    del reader
    for _ in range(5):
        reader = subscribe()
        change(source, dice)
        publisher.publish(source)
        reader.poll(Model(3))
    assert same_bits(state(model), before)
    del reader
    gc.collect()
    (directory,) = tmp_path.iterdir()
    assert [path.suffix.partition("-")[0] for path in directory.iterdir()] == [".1"]
    assert same_bits(state(model), before)
    del model
    assert bits(weight) == bits(before["embedding.weight"][3:])
    assert len([path for *_, path in mappings() if path.startswith(str(tmp_path))]) == 1
    del weight
    assert not [path for *_, path in mappings() if path.startswith(str(tmp_path))]
    reader, model = subscribe(), Model(4)
    reader.poll(model)
    del model, reader
    assert list(directory.iterdir()) == []


def test_tensors_that_cannot_be_in_shared_memory_are_copied(publisher, subscribe, tmp_path):
    source = Model(1)
    publisher.publish(source)
    half, ordinary = Model(2).half(), Model(3)
    plain = {name: torch.zeros_like(tensor) for name, tensor in source.state_dict().items()}
    places = [tensor.data_ptr() for tensor in (*tensors(half), *plain.values())]
    for target in (half, plain, ordinary):
        subscribe().poll(target)
    assert [t.data_ptr() for t in (*tensors(half), *plain.values())][:3] == places[:3]
    assert [t.data_ptr() for t in plain.values()] == places[-len(plain) :]
    assert same_bits(plain, state(source))
    assert {inode(tensor, tmp_path) for tensor in plain.values()} == {None}
    assert inodes(half.layers[0], tmp_path) == {None}
    assert bits(half.brain) == bits(source.brain.half())
    assert None not in inodes(ordinary, tmp_path)
    two = {"actor": Model(4), "critic": nn.Linear(3, 4)}
    publisher.publish(two)
    other = {"actor": Model(5), "critic": nn.Linear(3, 4)}
    subscribe().poll(other)
    assert len(inodes(other["actor"], tmp_path) | inodes(other["critic"], tmp_path)) == 1
    assert None not in inodes(other["critic"], tmp_path)
    mixed = {f"actor.{name}": t for name, t in Model(6).state_dict().items()}
    subscribe().poll(mixed | {"critic": other["critic"]})
    assert same_bits(state(other["critic"]), state(two["critic"]))


def test_a_model_in_shared_memory_is_loaded_in_that_memory(publisher, subscribe):
    """Processes that share a model's memory see what is loaded into it."""
    source, model = Model(1), Model(2).share_memory()
    publisher.publish(source)
    seen = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    subscribe().poll(model)
    assert all(tensor.is_shared() for tensor in tensors(model))
    assert same_bits(seen, state(source))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_that_was_polled_without_autograd_can_be_trained(publisher, subscribe, mode):
    source, dice = Model(1), random.Random(5)
    publisher.publish(source)
    reader, model = subscribe(), Model(2)
    for _ in range(2):
        with mode():
            reader.poll(model)
        assert not any(tensor.is_inference() for tensor in tensors(model))
        model(torch.tensor([1, 2, 3])).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert same_bits(dict(model.named_parameters()), dict(source.named_parameters()))
        change(source, dice)
        publisher.publish(source)
    reader.poll(model)
    assert same_bits(state(model), state(source))


@pytest.mark.parametrize("url", ["fake://distributed"])
def test_a_distributed_tensor_is_loaded(publisher, subscribe):
    from torch import distributed
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    source = nn.Linear(20, 30)
    publisher.publish(source)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Replicate()):
            model = nn.Linear(20, 30)
            model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [placement]))
            subscribe().poll(model)
            assert torch.equal(model.weight.to_local(), source.weight)
            assert torch.equal(model.bias, source.bias)
    finally:
        distributed.destroy_process_group()


def test_merged_weights_are_private(publisher, subscribe, tmp_path):
    def model():
        return nn.ModuleDict({"a": nn.Linear(30, 50, bias=False), "b": nn.Linear(30, 40)})

    base, models, readers = model(), [model() for _ in range(3)], [subscribe() for _ in range(3)]
    publisher.publish(base)
    for reader, at in zip(readers, models, strict=True):
        reader.poll(at)
    first, second, before = Lora(base["a"]), Lora(base["a"]), state(base)
    publisher.publish_lora(nn.ModuleDict({"a": first}))
    readers[0].poll(models[0])
    assert torch.equal(models[0]["a"].weight, first.merged_weight())
    assert None not in inodes(models[0], tmp_path)
    assert all(same_bits(state(at), before) for at in models[1:])
    publisher.publish_lora(nn.ModuleDict({"a": second}))
    readers[1].poll(models[1])
    late = model()
    subscribe().poll(late)
    for at in (models[1], late):
        assert torch.equal(at["a"].weight, second.merged_weight())
        assert same_bits(state(at["b"]), state(base["b"]))
    assert torch.equal(models[0]["a"].weight, first.merged_weight())
    assert same_bits(state(models[2]), before)
    with torch.no_grad():
        base["b"].weight[0] += 1
    assert publisher.publish(base).kind == "delta"
    for reader, at in zip(readers, models, strict=True):
        reader.poll(at)
        assert same_bits(state(at), state(base))


def test_an_emptied_server_counts_from_1_again(client, namespace, publisher, subscribe):
    source, dice, old, model = Model(1), random.Random(6), subscribe(), Model(2)
    for _ in range(5):
        change(source, dice)
        publisher.publish(source)
        old.poll(model)
    lose_all(client, namespace)
    again = redrb.WeightPublisher(client, "actor", namespace=namespace)
    following, follower = subscribe(), Model(3)
    for version in range(1, 9):
        change(source, dice)
        assert again.publish(source).version == version
        fresh = Model(4)
        subscribe().poll(fresh)
        following.poll(follower)
        assert same_bits(state(fresh), state(source))
        assert same_bits(state(follower), state(source))
        old.poll(model)
        assert same_bits(state(model), state(source))


def test_a_corrupt_chunk_loads_nothing_and_is_followed_by_versions_that_do(
    client, namespace, publisher, subscribe
):
    source, dice = Model(1), random.Random(7)
    readers, models = [subscribe() for _ in range(3)], [Model(seed) for seed in (2, 3, 4)]
    publisher.publish(source)
    for reader, model in zip(readers[:2], models[:2], strict=True):
        reader.poll(model)
    first, untouched = state(source), state(models[2])
    known = set(keys_of(client, namespace))
    for parameter in source.parameters():
        parameter.data.add_(1)
    publisher.publish(source)
    for key in set(keys_of(client, namespace)) - known:
        if key.startswith(("chunk:", "delta:")):
            stored = client.execute("GET", prefix(namespace) + key)
            client.execute("SET", prefix(namespace) + key, stored[:-1] + bytes([stored[-1] ^ 1]))
    for _ in range(2):
        for reader, model in zip(readers, models, strict=True):
            with pytest.raises(WeightCorrupt):
                reader.poll(model)
    assert all(same_bits(state(model), first) for model in models[:2])
    assert same_bits(state(models[2]), untouched)
    assert [reader.version for reader in readers] == [1, 1, None]
    later = redrb.WeightPublisher(client, "actor", namespace=namespace)
    for _ in range(3):
        change(source, dice)
        later.publish(source)
        for reader, model in zip(readers, models, strict=True):
            reader.poll(model)
            assert same_bits(state(model), state(source))


def test_when_a_leaders_fetch_breaks_off_another_one_leads(publisher, subscribe, monkeypatch):
    source, fetch, fetched = Model(1), catalogue.fetch, []
    publisher.publish(source)
    started = threading.Barrier(4)

    def breaking(client, batch):
        fetched.append(batch)
        if len(fetched) == 1:
            time.sleep(0.1)  # the others wait for this one
            raise StoreUnavailable("gone", where="nowhere")
        fetch(client, batch)

    monkeypatch.setattr(catalogue, "fetch", breaking)
    models, errors = [Model(seed) for seed in range(2, 6)], []

    def run(model):
        started.wait()
        try:
            subscribe().poll(model)
        except StoreUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(errors) == 1
    assert sum(same_bits(state(model), state(source)) for model in models) == 3
    assert len(fetched) == 2


def test_a_version_that_another_has_fetched_meanwhile_is_not_fetched(
    publisher, subscribe, monkeypatch, tmp_path
):
    source, models, use = Model(1), [Model(2), Model(3)], versions.acquire_fifo
    fetched, fetch = [], catalogue.fetch
    publisher.publish(source)
    first = subscribe()
    first.poll(models[0])
    change(source, random.Random(10))
    publisher.publish(source)

    def late(path):
        monkeypatch.setattr(versions, "acquire_fifo", use)
        first.poll(models[0])
        return use(path)

    def counted(client, batch):
        fetched.append(batch)
        fetch(client, batch)

    monkeypatch.setattr(versions, "acquire_fifo", late)
    monkeypatch.setattr(catalogue, "fetch", counted)
    last = subscribe()
    last.poll(models[1])
    assert len(fetched) == 1
    assert same_bits(state(models[1]), state(source))
    assert inodes(models[1], tmp_path) == inodes(models[0], tmp_path)


def has_loaded(subscriber, state):
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    subscriber.poll(target)
    return same_bits(target, state)


def test_a_reader_follows_a_server_that_lost_its_data(client, namespace, subscribe):
    def publish(times, value):
        publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=8)
        for number in range(times):
            state = {"a": torch.full((5000,), float(value))}
            state["a"][number] += 1
            publisher.publish(state)
        return state

    subscriber = subscribe()
    first = publish(5, 1)
    assert has_loaded(subscriber, first)
    assert subscriber.version == 5
    lose_all(client, namespace)
    second = publish(6, 7)  # its versions 1 to 5 are others, and 6 is a delta to one of them
    assert has_loaded(subscriber, second)
    assert subscriber.version == 6


def test_a_reader_tries_again_when_a_chunk_was_gone(publisher, subscribe, monkeypatch):
    publisher.publish({"a": torch.ones(5000)})
    original, calls = catalogue.fetch, []

    def fetch(client, values):
        calls.append(1)
        if len(calls) == 1:
            raise ChunkGoneError("gone")
        original(client, values)

    monkeypatch.setattr(catalogue, "fetch", fetch)
    assert has_loaded(subscribe(), {"a": torch.ones(5000)})
    assert len(calls) > 1


@pytest.mark.parametrize("loaded", [False, True])
def test_a_version_that_vanishes_before_it_is_fetched_is_none(
    client, namespace, publisher, subscribe, monkeypatch, loaded
):
    subscriber, target = subscribe(), Model(1)
    publisher.publish(Model(2))
    if loaded:
        subscriber.poll(target)
        publisher.publish(Model(3))
    before = copied(target.state_dict())
    use = HostVersions.use

    def using(*arguments, **options):
        if keys := keys_of(client, namespace):
            client.execute("DEL", *[prefix(namespace) + key for key in keys])
        return use(*arguments, **options)

    monkeypatch.setattr(HostVersions, "use", using)
    assert subscriber.poll(target) is None
    assert same_bits(target.state_dict(), before)


@pytest.mark.parametrize(
    "newer",
    [
        torch.full((4096,), 2.0, dtype=torch.bfloat16),
        torch.full((2000,), 2.0, dtype=torch.float16),
        torch.full((90_000,), 2.0, dtype=torch.float16),
    ],
    ids=["another dtype", "smaller", "larger"],
)
def test_a_layout_that_changes_while_a_version_is_fetched(
    client, namespace, subscribe, monkeypatch, newer
):
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=4)
    publisher.publish({"a": torch.zeros(4096, dtype=torch.float16)})
    subscriber = subscribe()
    assert has_loaded(subscriber, {"a": torch.zeros(4096, dtype=torch.float16)})
    publisher.publish({"a": torch.ones(4096, dtype=torch.float16)})
    use = HostVersions.use

    def using(*arguments, **options):
        monkeypatch.setattr(HostVersions, "use", use)
        publisher.publish({"a": newer})
        return use(*arguments, **options)

    monkeypatch.setattr(HostVersions, "use", using)
    ones = torch.ones(4096, dtype=torch.float16)
    assert has_loaded(subscriber, {"a": ones})
    assert subscriber.version == 2
    for reader in (subscriber, subscribe()):
        assert has_loaded(reader, {"a": newer})
        assert reader.version == 3


@pytest.mark.parametrize("url", ["fake://one-of-two"])
def test_two_servers_of_one_address_share_nothing(
    client, namespace, publisher, subscribe, tmp_path
):
    """Such as `redis:6379` in two compose projects that have one /dev/shm."""
    with redrb.connect("fake://other-of-two", retry_s=10) as other:
        other.where = client.where
        second = redrb.WeightPublisher(other, "actor", namespace=namespace)
        strange = redrb.WeightSubscriber(other, "actor", namespace=namespace, host_cache=True)
        reader, own = subscribe(), Model(1)
        models, others = (Model(2), Model(3)), Model(4)
        for version in range(1, 8):
            publisher.publish(own)
            second.publish(others)
            assert reader.poll(models[0]).version == strange.poll(models[1]).version == version
            assert same_bits(state(models[0]), state(own))
            assert same_bits(state(models[1]), state(others))
            files = list(next(tmp_path.iterdir()).iterdir())
            # of each a version, memory for the next, and one that a thread still unmaps
            assert len(files) <= 6
            change(own, random.Random(version))
            change(others, random.Random(-version))


def test_a_version_is_used_only_if_it_is_the_published_one(client, namespace, subscribe):
    """Other versions have the same numbers, as after a failover, and a reader has one of them."""
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    publisher.publish(Model(1))
    publisher.publish(Model(2))
    reader = subscribe()
    reader.poll(Model(9))
    client.execute("DEL", *(prefix(namespace) + key for key in ("versions", "manifests")))
    again = redrb.WeightPublisher(client, "actor", namespace=namespace, keep=9)
    for seed in (5, 6, 7, 8):
        again.publish(Model(seed))
        for each in (reader, subscribe()):
            found = Model(9)
            each.poll(found)
            assert same_bits(state(found), state(Model(seed)))


def test_a_damaged_version_is_not_the_base_of_the_next(publisher, subscribe, tmp_path):
    source, reader, model = Model(1), subscribe(), Model(2)
    publisher.publish(source)
    reader.poll(model)
    (path,) = next(tmp_path.iterdir()).iterdir()
    with path.open("r+b") as file:
        file.write(b"other code")
    change(source, random.Random(1))
    assert publisher.publish(source).kind == "delta"
    assert reader.poll(model).version == 2
    assert same_bits(state(model), state(source))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(publisher, subscribe, tmp_path, mode):
    publisher.publish(Model(1))
    directory = tmp_path / f"redrb-{os.geteuid()}"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="that only user"):
        subscribe().poll(Model(2))
    assert list(directory.iterdir()) == []


def test_a_directory_that_is_a_link_or_a_file_is_refused(publisher, subscribe, tmp_path):
    publisher.publish(Model(1))
    (tmp_path / "real").mkdir(mode=0o700)
    directory = tmp_path / f"redrb-{os.geteuid()}"
    directory.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="that only user"):
        subscribe().poll(Model(2))
    directory.unlink()
    directory.write_text("")
    with pytest.raises(ConfigError, match="that only user"):
        subscribe().poll(Model(2))


def test_the_directory_is_private(publisher, subscribe, monkeypatch, tmp_path):
    publisher.publish(Model(1))
    subscribe().poll(Model(2))
    assert (tmp_path / f"redrb-{os.geteuid()}").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(shared_copy, "_SHARED_MEMORY", tmp_path / "no" / "where")
    with pytest.raises(WeightError, match="host_cache out"):
        subscribe().poll(Model(2))


def test_a_process_that_fetches_for_too_long_is_not_waited_for(
    publisher, subscribe, monkeypatch, tmp_path, caplog
):
    source, model, first = Model(1), Model(2), subscribe()
    publisher.publish(source)
    first.poll(Model(3))
    publisher.publish(Model(1))
    (directory,) = tmp_path.iterdir()
    (version,) = directory.iterdir()
    writer = locks.acquire_fifo(version.with_suffix(".lock"))
    monkeypatch.setattr(shared_copy, "_FETCH_S", 0.05)
    subscribe().poll(model)
    assert same_bits(state(model), state(source))
    assert "into private memory" in caplog.text
    writer.release()


def test_a_full_disk_under_the_cache_is_told_and_the_next_version_loads(
    client, publisher, subscribe, monkeypatch, tmp_path
):
    """The room for a version is taken before its first byte, so no reader dies of SIGBUS."""
    with small_disk(tmp_path / "memory", "1m") as memory:
        monkeypatch.setattr(shared_copy, "_SHARED_MEMORY", memory)
        state, target = {"a": torch.zeros(50_000)}, {"a": torch.ones(50_000)}
        reader, other = subscribe(), subscribe()
        publisher.publish(state)
        assert reader.poll(target)
        filler = fill(memory)
        publisher.publish({"a": torch.full((50_000,), 2.0)})
        for each in (reader, other):
            with pytest.raises(WeightError, match="no room for the host cache"):
                each.poll(target)
        assert not target["a"].any()  # the model has version 1 as a whole
        filler.unlink()
        for each in (reader, other):
            assert each.poll(target).version == 2
            assert target["a"].eq(2).all()
