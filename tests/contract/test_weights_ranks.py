"""Several ranks publish one version: whole or not at all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import redrb
from redrb.connection import Client
from redrb.connection.messages import post
from redrb.errors import ConfigError, EncodeError, StoreError, WeightError
from redrb.keys import WeightKeys
from redrb.weights import TensorShard, WeightVersion
from redrb.weights.publishing import rank_rendezvous
from redrb.weights.publishing.rank_messages import BEGIN_AGAIN, BeginAgainError, Decision, Offer
from redrb.weights.publishing.rank_rendezvous import RendezvousLeader, RendezvousMember
from redrb.weights.publishing.staging import StagedPart, StagingPlace
from redrb.weights.wire.layout import Layout

WORLD = 3

State = dict[str, "Tensor | TensorShard"]
Publish = Callable[..., list["WeightVersion | Exception"]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)


def whole() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(30, 17, generator=dice).bfloat16(),
        "columns": torch.randn(8, 33, generator=dice),
        "uneven": torch.randn(7, 5, generator=dice),
        "own of 0": torch.randn(5000, generator=dice).bfloat16(),
        "own of 2": torch.arange(100),
    }


def shards(state: dict[str, Tensor], rank: int) -> State:
    """Return what one of three ranks has."""
    at = 10 * rank
    low, high = (0, 3, 6, 7)[rank], (0, 3, 6, 7)[rank + 1]
    found: State = {
        "rows": TensorShard(state["rows"][at : at + 10], (30, 17), (at, 0)),
        "columns": TensorShard(
            state["columns"][:, 11 * rank : 11 * rank + 11], (8, 33), (0, 11 * rank)
        ),
        "uneven": TensorShard(state["uneven"][low:high], (7, 5), (low, 0)),
    }
    own = f"own of {rank}"
    return found | ({own: state[own]} if own in state else {})


def change(state: dict[str, Tensor], dice: random.Random) -> None:
    for tensor in state.values():
        if dice.random() < 0.6:
            tensor.view(-1)[dice.randrange(tensor.numel())] += 1


@pytest.fixture
def ranks(client: Client, namespace: str) -> Iterator[Publish]:
    """Publish on all ranks at once, each with a publisher of its own."""
    publishers: dict[int, redrb.WeightPublisher] = {}
    with ThreadPoolExecutor(WORLD) as threads:

        def publish(
            states: list[State],
            *,
            timeout: float = 20,
            version: int | None = None,
            world_size: int | None = None,
        ) -> list:
            for rank in range(len(states)):
                if rank not in publishers:
                    publishers[rank] = redrb.WeightPublisher(
                        *(client, "actor"),
                        namespace=namespace,
                        rank=rank,
                        world_size=world_size or len(states),
                        anchor_every=4,
                        timeout=timeout,
                    )
            futures: list[Future[WeightVersion]] = [
                threads.submit(publishers[rank].publish, state, version=version)
                for rank, state in enumerate(states)
            ]
            return [future.exception(60) or future.result() for future in futures]

        def made(rank: int, world_size: int) -> redrb.WeightPublisher:
            return redrb.WeightPublisher(
                *(client, "actor"),
                namespace=namespace,
                rank=rank,
                world_size=world_size,
                anchor_every=4,
                timeout=20,
            )

        publish.publishers = publishers
        publish.made = made
        yield publish


@pytest.fixture
def reader(client: Client, namespace: str) -> redrb.WeightSubscriber:
    return redrb.WeightSubscriber(client, "actor", namespace=namespace)


def test_shards_become_whole_tensors(ranks, reader, client, namespace):
    state, dice = whole(), random.Random(0)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    slices = {
        "rows": TensorShard(torch.zeros(5, 17).bfloat16(), (30, 17), (13, 0)),
        "columns": TensorShard(torch.zeros(8, 5), (8, 33), (0, 20)),
    }
    slicing = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    in_place = redrb.WeightSubscriber(client, "actor", namespace=namespace)
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    kinds = []
    for _ in range(9):
        versions = ranks([shards(state, rank) for rank in range(WORLD)])
        assert len({version.version for version in versions}) == 1
        kinds.append(versions[0].kind)
        reader.poll(target)
        slicing.poll(slices, strict="model")
        in_place.poll(live, in_place=True)
        for name, tensor in state.items():
            assert torch.equal(target[name], tensor), name
            assert torch.equal(live[name], tensor), name
        assert torch.equal(slices["rows"].tensor, state["rows"][13:18])
        assert torch.equal(slices["columns"].tensor, state["columns"][:, 20:25])
        change(state, dice)
    assert kinds == ["full", "delta", "delta", "delta"] * 2 + ["full"]


def test_a_late_reader_gets_the_same(ranks, reader):
    state, dice = whole(), random.Random(1)
    for _ in range(3):
        ranks([shards(state, rank) for rank in range(WORLD)])
        before = {name: tensor.clone() for name, tensor in state.items()}
        change(state, dice)
    fetched = reader.fetch()
    assert fetched.keys() == before.keys()
    assert all(torch.equal(fetched[name], before[name]) for name in before)


def test_a_rank_that_does_not_come_is_named(ranks, reader, client, namespace):
    state = whole()
    ranks([shards(state, rank) for rank in range(WORLD)])
    late = redrb.WeightPublisher(
        *(client, "actor"), namespace=namespace, rank=0, world_size=WORLD, timeout=0.3
    )
    with pytest.raises(WeightError, match=r"ranks \[1, 2\] did not come within 0.3 s"):
        late.publish(shards(state, 0))
    assert reader.latest().version == 1


def test_rank_0_that_does_not_come_is_named(client, namespace):
    publisher = redrb.WeightPublisher(
        *(client, "actor"), namespace=namespace, rank=1, world_size=2, timeout=0.3
    )
    with pytest.raises(WeightError, match=r"rank 0 did not answer rank 1 within 0.3 s"):
        publisher.publish({"a": torch.ones(3)})


def impatient(ranks, rank, timeout=0.2):
    own = ranks.publishers[rank]._ranks
    own._timeout = timeout
    if rank == 0:
        own._rendezvous._timeout = timeout


def step_of(found):
    """Return the step that all shards are of."""
    steps = {int(value) for tensor in found.values() for value in tensor.view(-1)}
    assert len(steps) == 1, steps
    return steps.pop()


def parts_of(step):
    """Return what two ranks have after a step: every element is its number."""
    whole = torch.full((600, 4), float(step))
    return [
        {"w": TensorShard(whole[300 * r : 300 * r + 300], (600, 4), (300 * r, 0))} for r in (0, 1)
    ]


def test_a_rank_that_was_not_answered_in_time_is_not_mixed_with_the_next_step(ranks, reader):
    ranks(parts_of(1))
    impatient(ranks, 1)
    with pytest.raises(WeightError, match="did not answer"):
        ranks.publishers[1].publish(parts_of(2)[1])
    impatient(ranks, 1, 20)
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(ranks.publishers[1].publish, parts_of(3)[1])
        with pytest.raises(WeightError, match="rank 1: WeightError: rank 0 did not answer"):
            ranks.publishers[0].publish(parts_of(2)[0])  # late
        assert step_of(reader.fetch()) == 1
        assert ranks.publishers[0].publish(parts_of(3)[0]).version == 2
        assert later.result(20).version == 2
    assert step_of(reader.fetch()) == 3


@pytest.mark.parametrize("first", [True, False], ids=["its first call", "a later call"])
def test_a_rank_that_was_not_waited_for_is_not_mixed_with_the_next_step(ranks, reader, first):
    state = parts_of(1)
    if first:
        for rank in (0, 1):
            ranks.publishers[rank] = ranks.made(rank, 2)
    else:
        ranks(state)
    impatient(ranks, 0)
    with pytest.raises(WeightError, match=r"ranks \[1\] did not come"):
        ranks.publishers[0].publish(parts_of(2)[0])
    impatient(ranks, 0, 20)
    with ThreadPoolExecutor(1) as threads:
        on_time = threads.submit(ranks.publishers[0].publish, parts_of(3)[0])
        with pytest.raises(WeightError, match="rank 0 did not wait for this call any longer"):
            ranks.publishers[1].publish(parts_of(2)[1])  # late
        version = ranks.publishers[1].publish(parts_of(3)[1]).version
        assert on_time.result(20).version == version
    assert step_of(reader.fetch()) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_invalid_state_of_one_rank_fails_the_call_of_all(ranks, reader, rank):
    ranks(parts_of(1))
    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(ranks.publishers[rank].publish, {"w": 1})
        with pytest.raises(WeightError, match="EncodeError"):
            ranks.publishers[1 - rank].publish(parts_of(2)[1 - rank])
        assert isinstance(failing.exception(20), EncodeError)
    assert [version.version for version in ranks(parts_of(3))] == [2, 2]
    assert step_of(reader.fetch()) == 3


def test_messages_that_come_twice_harm_no_later_version(ranks, reader, monkeypatch):
    ranks(parts_of(1))
    post = rank_rendezvous.post

    def post_twice(*arguments, **options):
        post(*arguments, **options)
        post(*arguments, **options)

    monkeypatch.setattr(rank_rendezvous, "post", post_twice)
    failures = ranks([parts_of(2)[0], {"w": 1}])
    assert isinstance(failures[0], WeightError)
    assert isinstance(failures[1], EncodeError)
    for step in (3, 4):
        assert {version.version for version in ranks(parts_of(step))} == {step - 1}
        assert step_of(reader.fetch()) == step


@pytest.mark.parametrize("error", [MemoryError("full"), StoreError("refused")], ids=repr)
def test_a_rank_that_breaks_before_it_offers_anything_is_not_waited_for(
    ranks, reader, monkeypatch, error
):
    ranks(parts_of(1))
    memory = ranks.publishers[1]._baseline
    monkeypatch.setattr(memory, "difference", lambda *_: (_ for _ in ()).throw(error))
    began = time.monotonic()
    failures = ranks(parts_of(2))
    assert time.monotonic() - began < 10
    assert isinstance(failures[0], WeightError)
    assert failures[1] is error
    monkeypatch.undo()
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)
    assert [version.version for version in ranks(parts_of(3))] == [2, 2]


def test_a_rank_that_starts_again_is_not_taken_for_its_earlier_self(ranks, reader, monkeypatch):
    state = whole()
    ranks([shards(state, rank) for rank in range(WORLD)])
    before = {name: tensor.clone() for name, tensor in state.items()}
    change(state, random.Random(2))
    # its offer is there, and then it is gone, without a word
    monkeypatch.setattr(RendezvousMember, "fail", lambda *_: None)
    impatient(ranks, 2)
    with pytest.raises(WeightError, match="did not answer"):
        ranks.publishers[2].publish(shards(state, 2))
    monkeypatch.undo()
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)
    del ranks.publishers[2]
    versions = ranks([shards(state, rank) for rank in range(WORLD)])
    assert [version.version for version in versions] == [2, 2, 2]
    fetched = reader.fetch()
    assert all(torch.equal(fetched[name], state[name]) for name in state)
    assert not all(torch.equal(fetched[name], before[name]) for name in state)


@pytest.mark.parametrize("dies_at", ["decide", "parts"])
def test_a_restarted_rank_0_joins_the_call_that_the_other_ranks_are_in(
    ranks, reader, monkeypatch, dies_at
):
    """The ranks have staged a delta for its earlier process, and its first version is whole."""
    state = whole()
    ranks([shards(state, rank) for rank in range(WORLD)])
    change(state, random.Random(2))

    class KilledError(BaseException):
        """Ends rank 0, which then sends nothing and deletes nothing."""

    decide = RendezvousLeader.decide

    def die(leader, *arguments):
        if dies_at == "decide":
            decide(leader, *arguments)  # one rank learns of it
        raise KilledError

    leader = ranks.publishers.pop(0)
    monkeypatch.setattr(RendezvousLeader, dies_at, die)
    monkeypatch.setattr(RendezvousLeader, "end", lambda *_: None)
    monkeypatch.setattr(leader._committer, "discard", lambda _: None)
    with ThreadPoolExecutor(WORLD) as threads:
        others = [
            threads.submit(ranks.publishers[rank].publish, shards(state, rank)) for rank in (1, 2)
        ]
        with pytest.raises(KilledError):
            leader.publish(shards(state, 0))
        monkeypatch.undo()
        monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)
        first = ranks([shards(state, 0)], world_size=WORLD)
        assert [first[0].version, *(other.result(30).version for other in others)] == [2, 2, 2]
    fetched = reader.fetch()
    assert all(torch.equal(fetched[name], state[name]) for name in state)
    change(state, random.Random(3))
    assert [v.kind for v in ranks([shards(state, rank) for rank in range(WORLD)])] == ["delta"] * 3
    fetched = reader.fetch()
    assert all(torch.equal(fetched[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "answer",
    [{"error": BEGIN_AGAIN}, {"manifest": b"m", "created_s": 1.5}],
    ids=["again", "committed"],
)
def test_replies_that_come_early_or_twice_are_not_lost(client, namespace, answer):
    keys = WeightKeys.of(namespace, "actor")
    decision = Decision(StagingPlace(7, 3), whole=True, delta=False)
    member = RendezvousMember(client, keys, 1, 5, publisher="p", number=1)
    leader = RendezvousLeader(client, keys, world_size=2, timeout=5)
    offer = Offer(1, member._call, 1, 0, 0)
    leader._offers[1] = offer
    leader.decide(offer, decision)
    leader.decide(offer, decision)  # as after a connection that broke
    leader.end(answer)
    assert member.decision(chunks=1, version=0, base=0) == decision
    part = StagedPart(decision.place, Layout((), 0, 1024), ())
    if "error" in answer:
        with pytest.raises(BeginAgainError):
            member.outcome(part)
    else:
        assert member.outcome(part) == (b"m", 1.5)
    member.close()
    assert client.at(keys.rendezvous).execute("EXISTS", keys.replies(member._call)) == 0


@pytest.mark.parametrize("same", [True, False], ids=["the same process", "a new one"])
def test_an_offer_of_another_attempt_is_not_waited_on(client, namespace, same):
    """What was said twice in an attempt that was given up may be read in the next one."""
    keys = WeightKeys.of(namespace, "actor")
    leader = RendezvousLeader(client, keys, world_size=2, timeout=5)
    leader.begin()
    for publisher, call in (("p", "over"), ("p" if same else "q", "now")):
        sender = {"rank": 1, "publisher": publisher, "number": 1, "call": call}
        post(client, [keys.rendezvous], {**sender, "chunks": 1, "version": 0, "base": 0})
    assert [offer.call for offer in leader.offers()] == ["over"]
    with pytest.raises(BeginAgainError):
        leader.parts({1: Decision(StagingPlace(1, 1), whole=True, delta=False)})
    assert leader._offers[1].call == "now"


@pytest.mark.parametrize(
    ("change_rank_1", "message"),
    [
        (lambda s: s | {"own of 0": torch.ones(5000).bfloat16()}, "the same on rank 1"),
        (
            lambda s: s | {"rows": TensorShard(torch.zeros(9, 17).bfloat16(), (30, 17), (10, 0))},
            "rows",
        ),
        (lambda s: s | {"rows": TensorShard(torch.zeros(10, 17), (30, 17), (10, 0))}, "rows"),
        (lambda s: {k: v for k, v in s.items() if k != "columns"}, "columns"),
    ],
    ids=["twice", "a gap", "another dtype", "missing"],
)
def test_shards_that_do_not_fit_publish_nothing(ranks, reader, change_rank_1, message):
    state = whole()
    ranks([shards(state, rank) for rank in range(WORLD)])
    states = [shards(state, rank) for rank in range(WORLD)]
    states[1] = change_rank_1(states[1])
    failures = ranks(states)
    assert isinstance(failures[0], EncodeError)
    assert message in str(failures[0])
    assert all(
        isinstance(failure, WeightError) and message in str(failure) for failure in failures[1:]
    )
    assert reader.latest().version == 1
    assert ranks([shards(state, rank) for rank in range(WORLD)])[0].version == 2


def test_a_rank_whose_state_cannot_be_published_fails_alone_and_at_once(ranks, reader):
    state = whole()
    states = [shards(state, rank) for rank in range(WORLD)]
    states[1] = {"a": torch.ones(3).to_sparse()}
    failures = ranks(states)
    assert isinstance(failures[1], EncodeError)
    assert all("sparse" in str(failure) for failure in failures)
    assert reader.latest() is None


@pytest.mark.parametrize("rank", range(WORLD))
def test_tokens_of_any_rank_that_were_used_before_are_left_out(
    ranks, reader, client, namespace, rank
):
    """A failover has lost the last tokens; their keys lie on other nodes, or came before it."""
    state = whole()
    parts = [shards(state, each) for each in range(WORLD)]
    ranks(parts)
    keys = WeightKeys.of(namespace, "actor")
    last = int(client.execute("HGET", f"{keys.prefix}fence", "token"))
    foreign = [
        name(last + WORLD * attempt - rank, number, 0)
        for attempt in range(1, 6)
        for name in (keys.chunk, keys.delta)
        for number in range(60)
    ]
    for key in foreign:
        client.execute("SET", key, b"of another publisher")
    state["columns"] += 1
    state["own of 0"][7] += 1
    published = ranks(parts)
    assert [each.version for each in published] == [2] * WORLD
    found = reader.fetch()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert {client.execute("GET", key) for key in foreign} == {b"of another publisher"}


def test_ranks_agree_on_the_version(ranks, reader):
    state = whole()
    assert ranks([shards(state, rank) for rank in range(WORLD)], version=7)[2].version == 7
    ranks.publishers[1].publish, original = (
        lambda states, **_: original(states, version=9),
        ranks.publishers[1].publish,
    )
    failures = ranks([shards(state, rank) for rank in range(WORLD)], version=8)
    assert isinstance(failures[0], ConfigError)
    assert all("version 9" in str(failure) for failure in failures)
    assert reader.latest().version == 7


def test_nothing_is_left_behind(ranks, client, namespace):
    state, dice = whole(), random.Random(3)
    for _ in range(6):
        ranks([shards(state, rank) for rank in range(WORLD)])
        change(state, dice)
    keys = client.execute("KEYS", f"redrb:{{{namespace}:weights:actor}}:*")
    lasting = [key for key in keys if client.execute("PTTL", key) < 0]
    kinds = {key.decode().partition("}:")[2].split(":")[0] for key in lasting}
    assert kinds == {"chunk", "delta", "fence", "fulls", "loads", "manifests", "versions"}
    assert {key.decode().partition("}:")[2] for key in keys} - {
        key.decode().partition("}:")[2] for key in lasting
    } <= {"rendezvous", "pins"}


def test_a_failing_server_fails_all_ranks(ranks, reader, monkeypatch):
    state = whole()
    ranks([shards(state, rank) for rank in range(WORLD)])
    change(state, random.Random(4))
    issuer = ranks.publishers[0]._committer
    monkeypatch.setattr(issuer, "commit", lambda *_: (_ for _ in ()).throw(StoreError("broken")))
    failures = ranks([shards(state, rank) for rank in range(WORLD)])
    assert all("broken" in str(failure) for failure in failures)
    monkeypatch.undo()
    assert reader.latest().version == 1
    monkeypatch.setattr("redrb.weights.publishing.publisher.CHUNK_BYTES", 1024)
    assert ranks([shards(state, rank) for rank in range(WORLD)])[0].version == 2


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (True, 2), (0, 0), (0, 1.5)])
def test_ranks_are_numbers(client, rank, world_size):
    with pytest.raises(ConfigError):
        redrb.WeightPublisher(client, "actor", rank=rank, world_size=world_size)


def test_a_shard_alone_is_refused(client, namespace):
    publisher = redrb.WeightPublisher(client, "actor", namespace=namespace)
    with pytest.raises(EncodeError, match="one rank's shard"):
        publisher.publish({"a": TensorShard(torch.ones(2), (4,), (0,))})


@pytest.mark.parametrize(
    ("shape", "start"), [((4,), (3,)), ((4,), (-1,)), ((4, 1), (0, 0)), ((1,), (0,))]
)
def test_a_shard_is_inside_of_its_tensor(shape, start):
    with pytest.raises(ConfigError, match="is not inside"):
        TensorShard(torch.ones(2), shape, start)
