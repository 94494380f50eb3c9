"""What a put of one group sends: one buffer, hardly larger than its payload."""

from __future__ import annotations

import pytest
from redis.connection import AbstractConnection

import redrb
from redrb.codec import encode_groups
from tests.samples import numbered
from tests.servers import programs

MOST_BEYOND = 600
"""Bytes of commands, ids, facts and the script's digest."""


@pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"order": "stalest", "max_staleness": 4}])
def test_a_put_is_one_send(real_url, namespace, monkeypatch, settings):
    sent: list[int] = []
    send = AbstractConnection.send_packed_command

    def noting(self, command, *args, **options):
        sent.extend(map(len, command))
        send(self, command, *args, **options)

    with (
        redrb.connect(real_url) as client,
        redrb.ExperienceStream(client, "task", namespace=namespace, **settings) as stream,
    ):
        group = [numbered(1), numbered(2)]
        stream.put(group, policy_version=1)  # brings the script's text
        monkeypatch.setattr(AbstractConnection, "send_packed_command", noting)
        for version in range(2, 5):
            stream.put(group, policy_version=version)
    (payload,) = (len(each.blob) for each in encode_groups([group]))
    puts = [size for size in sent if size > payload]
    assert len(puts) == 3
    assert sent[:3] == puts  # nothing between them
    assert max(puts) <= payload + MOST_BEYOND
