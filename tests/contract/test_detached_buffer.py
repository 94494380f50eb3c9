"""`DetachedReplayBuffer`: section A of the reference contracts, on fakeredis and real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from redrb import (
    BatchTimeout,
    BufferItem,
    Client,
    ConfigError,
    DetachedReplayBuffer,
    StoreFull,
    StoreUnavailable,
    make_experience_batch,
)


def item(number: int, length: int = 4) -> BufferItem:
    return BufferItem(
        sequences=torch.full((length,), number),
        action_log_probs=torch.full((2,), float(number)),
        values=torch.zeros(2),
        reward=torch.tensor(float(number)),
        kl=torch.zeros(2),
        advantages=torch.zeros(2),
        attention_mask=torch.ones(length, dtype=torch.int64),
        action_mask=torch.ones(2, dtype=torch.bool),
    )


def rewards(experience: object) -> list[float]:
    return experience.reward.tolist()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def open_buffer(client: Client, namespace: str) -> Callable[..., DetachedReplayBuffer]:
    def opened(size: int = 2, limit: int = 0, **options: object) -> DetachedReplayBuffer:
        return DetachedReplayBuffer(size, limit, client=client, namespace=namespace, **options)

    return opened


def test_items_and_batches_become_full_batches(
    open_buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    with open_buffer(3) as buffer:
        buffer.extend([item(0), item(1, 6)])
        assert buffer.get_length() == 0
        buffer.append(make_experience_batch([item(2), item(3), item(4)]))
        assert buffer.get_length() == 1
        first = buffer.sample()
        assert rewards(first) == [0, 1, 2]
        assert first.sequences is not None
        assert first.sequences.shape == (3, 6)
        with pytest.raises(BatchTimeout):
            buffer.sample(timeout=0)
        buffer.extend([])
        buffer.extend([item(5)])
        assert rewards(buffer.sample(to_device="cpu")) == [3, 4, 5]
        assert buffer.get_length() == 0


def test_a_batch_is_acknowledged_when_its_worker_samples_again(
    open_buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    buffer = open_buffer(2)
    buffer.extend([item(number) for number in range(6)])
    buffer.sample(0)
    buffer.sample(worker_rank=1)
    ledger = buffer.stream.stats().ledger
    assert (ledger.acked, ledger.leased, ledger.waiting) == (0, 4, 2)
    assert rewards(buffer.sample(0)) == [4, 5]
    ledger = buffer.stream.stats().ledger
    assert (ledger.acked, ledger.leased) == (2, 4)
    buffer.close()
    buffer = open_buffer(2)
    assert buffer.stream.stats().ledger.acked == 6
    buffer.close()


def test_a_batch_is_acknowledged_later_where_redis_was_away(
    open_buffer: Callable[..., DetachedReplayBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_buffer(2) as buffer:
        buffer.extend([item(number) for number in range(6)])
        buffer.sample()
        take = buffer.stream.take

        def away(*arguments: object, **options: object) -> object:
            raise StoreUnavailable("gone", where="here")

        monkeypatch.setattr(buffer.stream, "take", away)
        with pytest.raises(StoreUnavailable):
            buffer.sample()
        monkeypatch.setattr(buffer.stream, "take", take)
        assert rewards(buffer.sample()) == [2, 3]
        ledger = buffer.stream.stats().ledger
        assert (ledger.acked, ledger.leased, ledger.waiting) == (2, 2, 2)
        buffer.sample()
        for _ in range(2):  # an acknowledged batch is not delivered again
            with pytest.raises(BatchTimeout):
                buffer.sample(timeout=0)
        assert buffer.stream.stats().ledger.acked == 6


def test_an_exception_requeues_the_batch(
    open_buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    with pytest.raises(ZeroDivisionError), open_buffer(2) as buffer:
        buffer.extend([item(0), item(1)])
        buffer.sample()
        raise ZeroDivisionError
    with open_buffer(2) as buffer:
        assert rewards(buffer.sample(timeout=0)) == [0, 1]


def test_the_limit_counts_waiting_batches_and_blocks_producers(
    open_buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    with open_buffer(2, 2) as buffer:
        buffer.extend([item(number) for number in range(4)])
        with pytest.raises(StoreFull):
            buffer.extend([item(4)], timeout=0)
        done = threading.Event()

        def produce() -> None:
            buffer.extend([item(4), item(5)])
            done.set()

        thread = threading.Thread(target=produce)
        thread.start()
        assert not done.wait(0.1)
        assert rewards(buffer.sample()) == [0, 1]  # in training: it counts no more
        assert done.wait(20)
        thread.join(20)
        with pytest.raises(StoreFull):
            buffer.extend([item(6)], timeout=0)
        assert rewards(buffer.sample()) == [2, 3]
        assert rewards(buffer.sample()) == [4, 5]


@pytest.mark.parametrize("limit", [0, -1])
def test_no_limit_is_no_limit(open_buffer: Callable[..., DetachedReplayBuffer], limit: int) -> None:
    with open_buffer(1, limit) as buffer:
        buffer.extend([item(number) for number in range(200)])
        assert buffer.get_length() == 200


def test_clear_deletes_leased_batches_too(
    open_buffer: Callable[..., DetachedReplayBuffer],
) -> None:
    with open_buffer(2, 4) as buffer:
        buffer.extend([item(number) for number in range(6)])
        buffer.sample()
        buffer.clear()
        assert buffer.get_length() == 0
        assert len(buffer.stream) == 0
        buffer.extend([item(8), item(9)])
        assert rewards(buffer.sample(timeout=5)) == [8, 9]


@pytest.mark.parametrize(
    ("size", "limit", "message"),
    [(0, 0, "sample_batch_size"), (2, "3", "limit"), (1.5, 0, "batch")],
)
def test_bad_numbers_are_refused(client: Client, size: int, limit: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DetachedReplayBuffer(size, limit, client=client)


def test_without_a_url_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDRB_URL", raising=False)
    with pytest.raises(ConfigError, match="REDRB_URL"):
        DetachedReplayBuffer(2)
    with pytest.raises(ConfigError, match=r"redrb\.connect"):
        DetachedReplayBuffer(2, client=7)  # type: ignore[arg-type]
