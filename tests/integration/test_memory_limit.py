"""A server at its memory limit: puts wait, fail or evict, and nothing else stops working."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import torch

import redrb
from redrb import BufferItem, ExperienceStream, StoreFull
from redrb.errors import OutcomeUnknown
from tests.audit import audit
from tests.samples import numbered, numbers


def large(number: int) -> BufferItem:
    """Return a sample of about 64 KiB that cannot be packed."""
    generator = torch.Generator().manual_seed(number)
    return numbered(number, sequences=torch.randint(2**62, (8192,), generator=generator))


@pytest.fixture
def full(own_server):
    """A client of a server beyond its memory limit, with 40 large groups in the task "math"."""
    server = own_server("--maxmemory-policy", "noeviction")
    with redrb.connect(server.url, retry_s=5) as client:
        with ExperienceStream(client, "math") as stream:
            stream.put_many([[large(n)] for n in range(40)])
        info = client.execute("INFO", "memory").decode()
        used = int(info.partition("used_memory:")[2].split()[0])
        client.execute("CONFIG", "SET", "maxmemory", str(used - 256 * 1024))
        yield client


def test_puts_fail_with_the_reason_and_store_nothing(full):
    with ExperienceStream(full, "math", on_full="error") as stream:
        before = stream.stats()
        with pytest.raises(StoreFull, match="memory limit") as caught:
            stream.put_many([[large(n)] for n in range(8)])
        assert (caught.value.reason, caught.value.task) == ("memory", "math")
        after = stream.stats()
        assert (after.stored, after.ledger) == (before.stored, before.ledger)
        full.execute("CONFIG", "SET", "maxmemory", "0")  # 7.0 refuses transactions at the limit
        audit(stream)


@pytest.mark.parametrize("min_replicas", [0, 1])
def test_a_put_whose_reply_was_lost_is_found_at_the_memory_limit(full, monkeypatch, min_replicas):
    """The server refuses the repetition before it can say that the first attempt was stored."""
    limit = full.execute("CONFIG", "GET", "maxmemory")[1]
    full.execute("CONFIG", "SET", "maxmemory", "0")
    exchange, lost = full.exchange, []

    def lose_first_reply(pipeline):
        replies = exchange(pipeline)
        if not lost:
            lost.append(replies)
            full.execute("CONFIG", "SET", "maxmemory", limit)
            raise redis.exceptions.ConnectionError("lost")
        return replies

    with ExperienceStream(full, "math", on_full="error", min_replicas=min_replicas) as stream:
        stored = stream.stats().stored
        with monkeypatch.context() as patched:
            patched.setattr(full, "exchange", lose_first_reply)
            if min_replicas:
                with pytest.raises(OutcomeUnknown, match="3 groups are stored") as caught:
                    stream.put_many([[large(n)] for n in range(3)])
                assert caught.value.groups == 3
            else:
                assert len(stream.put_many([[large(n)] for n in range(3)])) == 3
        assert lost
        assert stream.stats().stored == stored + 3
        full.execute("CONFIG", "SET", "maxmemory", "0")  # 7.0 refuses transactions at the limit
        audit(stream)


@pytest.mark.parametrize("timeout", [0, 0.3])
def test_a_put_that_waits_gives_up_in_time(full, timeout):
    with ExperienceStream(full, "math") as stream:
        started = time.monotonic()
        with pytest.raises(StoreFull) as caught:
            stream.put(large(1), timeout=timeout)
        assert caught.value.reason == "memory"
        assert time.monotonic() - started < timeout + 30


def test_a_put_that_waits_goes_on_when_trainers_catch_up(full):
    with ExperienceStream(full, "math") as stream, ThreadPoolExecutor(1) as pool:
        stored = stream.stats().stored
        put = pool.submit(stream.put, large(1), timeout=20)
        deadline = time.monotonic() + 10
        while stream.stats().producers_waiting == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not put.done()
        stream.take(20, timeout=0).ack()  # buffers of clients count too
        assert put.result(timeout=30)
        assert stream.stats().stored == stored - 19
        full.execute("CONFIG", "SET", "maxmemory", "0")  # 7.0 refuses transactions at the limit
        audit(stream)


def test_dropping_makes_room_in_memory(full):
    with ExperienceStream(full, "math", on_full="drop_oldest") as stream:
        stream.join_group()
        for n in range(1000, 1010):
            stream.put(large(n))
        stats = stream.stats()
        assert stats.ledger.evicted > 0
        assert stats.ledger.balanced
        taken = numbers(stream.take(stats.stored, timeout=0))
        assert taken[-10:] == list(range(1000, 1010))
        full.execute("CONFIG", "SET", "maxmemory", "0")  # 7.0 refuses transactions at the limit
        audit(stream)


def test_leases_begin_and_end_at_the_limit(full):
    with ExperienceStream(full, "math") as stream:
        stored = stream.stats().stored
        first, second, third, fourth = (stream.take(4, timeout=0) for _ in range(4))
        first.reject("nan loss")
        second.release()
        with pytest.raises(ZeroDivisionError), third:
            raise ZeroDivisionError
        fourth.ack()
        stream._consumer.beat()
        ledger = stream.stats().ledger
        assert (ledger.dead, ledger.acked, ledger.waiting) == (4, 4, stored - 8)
        assert ledger.balanced
        full.execute("CONFIG", "SET", "maxmemory", "0")  # 7.0 refuses transactions at the limit
        audit(stream)
        assert len(stream.dead_letters()) == 4
        assert stream.clear() == stored - 8
        ExperienceStream(full, "other").close()
