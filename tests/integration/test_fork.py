"""A stream that is used on both sides of a fork."""

from __future__ import annotations

import gc
import os
import time
import warnings
from typing import Any

import pytest

import redrb
from tests.samples import numbered, numbers
from tests.scenes import holds_in_a_child


def test_parent_and_child_put_and_take_for_themselves(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        stream.put(numbered(0))
        lease = stream.take(1, timeout=0)

        def child():
            assert stream.put(numbered(1)) == (2,)
            lease = stream.take(1, timeout=5)
            assert numbers(lease) == [1]
            lease.ack()
            stream.close()
            return True

        assert holds_in_a_child(child)
        assert stream.put(numbered(2)) == (3,)
        assert numbers(lease) == [0]
        lease.ack()
        ledger = stream.stats().ledger
        assert (ledger.put, ledger.acked, ledger.waiting) == (3, 2, 1)
        stream.take(1, timeout=0).ack()


def test_a_copy_of_a_lease_that_a_child_drops_ends_no_lease(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        stream.put_many([[numbered(n)] for n in range(8)])
        held: list[Any] = [stream.leases(2, timeout=5)]
        held.append(next(held[0]))  # now a take is in flight too

        def child():
            own = stream.take(1, timeout=5)
            held.clear()
            gc.collect()
            stream._consumer.beat()
            own.ack()
            assert stream.stats().ledger.acked == 1
            stream.close()
            return True

        assert holds_in_a_child(child)
        stream._consumer.beat()
        loop, lease = held
        assert numbers(lease) == [0, 1]
        lease.ack()
        following = next(loop)
        assert numbers(following) == [2, 3]
        following.ack()
        assert stream.stats().ledger.acked == 5
        loop.close()


def test_a_child_cannot_end_a_lease_of_its_parent(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace, max_staleness=1) as stream,
        redrb.ExperienceStream(client, "next", namespace=namespace) as following,
    ):
        stream.put_many([[numbered(n)] for n in range(4)], policy_version=1)
        stream.advance(1)
        lease = stream.take(2, timeout=5)

        def child():
            stream.advance(9)
            for end in (
                lease.ack,
                lease.release,
                lease.expire,
                lambda: lease.fail("bad"),
                lambda: lease.reject("bad", lease.ids[:1]),
                lambda: lease.forward(following, [None, None]),
                lambda: stream.take(1, ack=lease, timeout=0),
                lambda: stream.is_fresh(lease),
                lambda: lease.__exit__(None, None, None),
            ):
                with pytest.raises(redrb.LeaseLost, match="from which this one was forked"):
                    end()
            for error in (SystemExit(0), ValueError("bad")):
                with pytest.raises(type(error)), lease:
                    raise error
            return stream.stats().ledger.leased == len(lease.batch()) == 2

        assert holds_in_a_child(child)
        assert (following.stats().ledger.put, following.stats().ledger.filtered) == (0, 0)
        lease.ack()
        ledger = stream.stats().ledger
        assert (ledger.acked, ledger.waiting, ledger.leased) == (2, 2, 0)


def test_a_child_goes_on_with_batches_of_its_own_in_a_loop_of_its_parent(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        stream.put_many([[numbered(n)] for n in range(8)])
        with stream.leases(2, timeout=5) as loop:
            assert numbers(next(loop)) == [0, 1]

            def child():
                assert numbers(next(loop)) == [4, 5]
                loop.close()
                stream.close()
                return True

            assert holds_in_a_child(child)
            ledger = stream.stats().ledger
            assert (ledger.acked, ledger.waiting, ledger.leased) == (0, 4, 4)
            assert numbers(next(loop)) == [2, 3]
            deadline = time.monotonic() + 20
            while stream.stats().ledger.acked != 2:  # sent before, on another connection
                assert time.monotonic() < deadline


def test_a_child_cannot_end_a_part_of_a_rank(real_url, namespace):
    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "math", namespace=namespace) as stream,
    ):
        stream.put(numbered(0))
        lease = stream.take(1, rank=0, world_size=1, step=0, timeout=5)

        def child():
            with pytest.raises(redrb.LeaseLost, match="from which this one was forked"):
                lease.ack()
            return stream.stats().ledger.acked == 0

        assert holds_in_a_child(child)
        lease.ack()
        assert stream.stats().ledger.acked == 1


def test_closing_an_embedded_server_does_not_wait_for_forked_children():
    client = redrb.connect("embedded://")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 20  # the child ends after thirty
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
