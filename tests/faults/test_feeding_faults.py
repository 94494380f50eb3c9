"""Servers and processes that die while experience is sent and fed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import redrb
from redrb import ExperienceStream
from redrb.errors import SendFailed
from redrb.stream.feeding import ExperienceLoader
from redrb.stream.sending import ExperienceSender
from tests.audit import audit
from tests.samples import numbered

ROOT = Path(__file__).parents[2]
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def test_groups_sent_while_servers_die_arrive_once_and_in_order(own_server):
    server, count = own_server(*DURABLE), 900
    with (
        redrb.connect(server.url, retry_s=0.3) as client,  # ends before the server is back
        ExperienceStream(client, "math") as stream,
        ExperienceSender(stream, max_groups=100) as sender,
    ):
        made = threading.Event()

        def make():
            for n in range(count):
                sender.send(numbered(n))
                if n % 300 == 150:
                    made.set()

        maker = threading.Thread(target=make)
        maker.start()
        for away_s in (0.0, 1.5):
            assert made.wait(20)
            made.clear()
            server.kill()
            time.sleep(away_s)
            with pytest.raises(SendFailed) as caught:
                sender.flush(timeout=0.1)
            assert 0 < caught.value.unsent <= 100
            server.start()
        maker.join(40)
        assert not maker.is_alive()
        sender.flush(timeout=20)
        assert sender.backpressure_s > 0.2
        assert sender.waiting_groups == 0
        lease = stream.take(count, timeout=5)
        assert [int(item.reward) for item in lease.items()] == list(range(count))
        assert stream.stats().ledger.put == count
        lease.release()
        audit(stream)


def test_a_loader_goes_on_when_its_server_was_away(own_server):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    with (
        redrb.connect(server.url, retry_s=30) as client,
        ExperienceStream(client, "math") as stream,
        ExperienceLoader(stream, 4, steps=20) as loader,
    ):
        stream.put_many([[numbered(n)] for n in range(80)])
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch.reward.int().tolist()
            if number in (3, 9):
                server.kill()
                server.start()
        assert seen == list(range(80))
        assert stream.stats().ledger.acked == 80
        audit(stream)
