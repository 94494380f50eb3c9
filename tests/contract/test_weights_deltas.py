"""All kinds of readers hold the published bits, whether they came as deltas or in full."""

import random
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import redrb
from tests.published import CHUNK_BYTES, bits, check_nothing_left, copied, every_kind, scribble

FLOATS = ("brain", "single", "half_", "double_")


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(CHUNK_BYTES, 1024)
    monkeypatch.setattr("redrb.weights.reading.shared_copy._SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("redrb.weights.reading.replica._WINDOW_BYTES", 700)


class Training:
    """A state that changes at random: all dtypes by bytes, some floats by small steps."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.state = every_kind(rows=1)
        self.state |= {
            "brain": torch.randn(1500).bfloat16(),
            "half_": torch.randn(30, 40).half(),
            "single": torch.randn(900),
            "double_": torch.randn(9, 50, dtype=torch.float64),
        }
        self.names = [n for n, t in self.state.items() if t.numel() and n not in FLOATS]

    def step(self):
        scribble(self.state, self.dice, self.dice.sample(self.names, self.dice.randint(0, 4)))
        for name in self.dice.sample(FLOATS, self.dice.randint(0, 4)):
            flat = self.state[name].view(-1)
            count = self.dice.choice([1, 5, flat.numel() // 20, flat.numel()])
            places = torch.randint(0, flat.numel(), (count,))
            flat[places] += torch.randn(count).to(flat.dtype) * 1e-2


class Reader:
    """A target of one kind, and how it is polled."""

    def __init__(self, client, namespace, target, *, host_cache=False, **options):
        self.subscriber = redrb.WeightSubscriber(
            client, "actor", namespace=namespace, host_cache=host_cache
        )
        self.target = target
        self.options = options

    def poll(self, version):
        found = self.subscriber.poll(self.target, **self.options)
        assert found is None or found.version == version
        assert self.subscriber.version == version

    def check(self, state):
        target = self.target
        named = target.state_dict() if isinstance(target, nn.Module) else target
        for name, target in named.items():
            if name in state:
                wanted = state[name].to(target.dtype)
                assert bits(target) == bits(wanted), (name, self.options)


def all_readers(client, namespace, state):
    """Readers of every kind; the last ones share a host cache."""

    def empty():
        return {name: torch.zeros_like(tensor).contiguous() for name, tensor in state.items()}

    def cast():
        kinds = {"brain": torch.float32, "single": torch.float16, "half_": torch.bfloat16}
        return empty() | {name: empty()[name].to(kind) for name, kind in kinds.items()}

    strided = {
        "half_": torch.zeros(40, 30, dtype=torch.float16).t(),
        "double_": torch.zeros(9, 100, dtype=torch.float64)[:, ::2],
        "conjugated": torch.zeros(5, dtype=torch.complex64).conj(),
        "tied too": torch.zeros(6, 10),
        "no such": torch.zeros(1),
    }

    def module(*names):
        made = nn.Module()
        for name in names:
            made.register_buffer(name, empty()[name])
        return made

    made = [
        (module(*FLOATS, "tied"), {"strict": "model"}),
        (module(*FLOATS, "scalar"), {"strict": "model", "in_place": True}),
        (module(*FLOATS, "empty"), {"strict": "model", "host_cache": True}),
        (module("brain", "tied too"), {"strict": "model", "host_cache": True}),
        (empty(), {}),
        (empty(), {"in_place": True}),
        (cast(), {}),
        (cast(), {"in_place": True}),
        ({"tied too": torch.zeros(6, 10), "brain": empty()["brain"]}, {"strict": "model"}),
        (copied(strided), {"strict": False}),
        (strided, {"strict": False, "in_place": True}),
        (empty(), {"host_cache": True}),
    ]
    return [Reader(client, namespace, target, **options) for target, options in made]


def follow(client, namespace, *, rounds, seed, **publishing):
    """Publish `rounds` versions that readers of all kinds fetch at times, and check each."""
    training = Training(seed)
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace, **publishing)
    readers = all_readers(client, namespace, training.state)
    kinds = []
    for number in range(1, rounds + 1):
        training.step()
        kinds.append(publisher.publish(training.state).kind)
        for reader in readers:
            if training.dice.random() < 0.25:
                reader.poll(number)
                reader.check(training.state)
        if training.dice.random() < 0.1:
            late = redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch()
            assert all(bits(late[name]) == bits(t) for name, t in training.state.items())
    check_nothing_left(client, namespace)
    return kinds


@pytest.mark.long
def test_all_kinds_of_readers_hold_the_published_bits(client, namespace):
    kinds = follow(client, namespace, rounds=60, seed=1, keep=3, anchor_every=9)
    assert kinds.count("delta") > 30
    assert kinds.count("full") > 6


def test_one_version_is_kept_and_all_is_cast_before_the_difference(client, namespace):
    training = Training(3)
    options = {"namespace": namespace, "keep": 1, "anchor_every": 5, "dtype": "bfloat16"}
    publisher = redrb.WeightPublisher(client, "actor", **options)
    readers = [
        redrb.WeightSubscriber(client, "actor", namespace=namespace, host_cache=shared)
        for shared in (False, True)
    ]
    targets = [copied(training.state) for _ in readers]
    for number in range(1, 25):
        training.step()
        publisher.publish(training.state)
        reader = number % 2
        readers[reader].poll(targets[reader])
        for name in FLOATS:
            wanted = training.state[name].bfloat16().to(training.state[name].dtype)
            assert bits(targets[reader][name]) == bits(wanted)
    check_nothing_left(client, namespace)


SHAPES = st.sampled_from([(), (0,), (1,), (3, 0, 2), (511,), (17, 33), (2, 3, 100)])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int16])
STATES = st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=5)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("edit"), st.integers(0, 4), st.floats(0, 1), st.integers(0, 2**31)),
        st.tuples(st.just("poll"), st.integers(0, 2)),
        st.tuples(st.just("other"), STATES),
    ),
    max_size=25,
)


def made(shapes):
    return {f"t{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(shapes)}


@settings(deadline=None, derandomize=True, max_examples=25)
@given(first=STATES, edits=EDITS, anchor_every=st.integers(1, 6), keep=st.integers(1, 4))
def test_any_sequence_of_changes_arrives(first, edits, anchor_every, keep):
    namespace = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch, redrb.connect(f"fake://{namespace}") as client:
        patch.setattr(CHUNK_BYTES, 256)
        publisher = redrb.WeightPublisher(
            client, "actor", namespace=namespace, keep=keep, anchor_every=anchor_every
        )
        subscribers = [
            redrb.WeightSubscriber(client, "actor", namespace=namespace) for _ in range(3)
        ]
        state = made(first)
        targets = [{}, {}, {}]
        newest = publisher.publish(state).version
        for edit in edits:
            if edit[0] == "other":
                state = made(edit[1])
            elif edit[0] == "edit":
                name = f"t{edit[1]}"
                raw = state[name].view(-1).view(torch.uint8) if name in state else torch.empty(0)
                dice = torch.Generator().manual_seed(edit[3])
                chosen = torch.rand(raw.numel(), generator=dice) < edit[2] ** 3
                count = int(chosen.sum())
                raw[chosen] = torch.randint(0, 256, (count,), generator=dice).to(raw.dtype)
            else:
                target = targets[edit[1]]
                if {n: t.shape for n, t in target.items()} != {
                    n: t.shape for n, t in state.items()
                }:
                    target.clear()
                    target |= {name: torch.ones_like(tensor) for name, tensor in state.items()}
                if any(target[name].dtype != state[name].dtype for name in state):
                    target |= {name: torch.ones_like(tensor) for name, tensor in state.items()}
                subscriber = subscribers[edit[1]]
                known = subscriber.version
                found = subscriber.poll(target, in_place=edit[1] == 2)
                assert (found and found.version) == (None if known == newest else newest)
                continue
            newest = publisher.publish(state).version
        fetched = redrb.WeightSubscriber(client, "actor", namespace=namespace).fetch()
        assert all(bits(fetched[name]) == bits(state[name]) for name in state)
        for subscriber, target in zip(subscribers, targets, strict=True):
            if subscriber.version == newest:
                assert all(bits(target[name]) == bits(state[name]) for name in target)
        check_nothing_left(client, namespace)
