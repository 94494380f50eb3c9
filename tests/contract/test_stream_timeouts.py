"""The error of a take whose time is up: it counts where every group is, and names similar tasks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from redrb import BatchTimeout, ExperienceStream, Status
from redrb.connection import Client
from redrb.experience import BufferItem
from tests.samples import numbered

FATES = {
    "available", "unmatched", "other_status", "leased_here", "leased_elsewhere", "acked", "expired",
    "filtered", "evicted", "dead",
}  # fmt: skip


def refused(stream: ExperienceStream, count: int = 4, **options: object) -> BatchTimeout:
    with pytest.raises(BatchTimeout) as caught:
        stream.take(count, timeout=0, **options)  # type: ignore[arg-type]
    error = caught.value
    assert error.fates["put"] == sum(error.fates.get(name, 0) for name in FATES)
    return error


def odd(group: Sequence[BufferItem]) -> bool:
    return int(group[0].reward) % 2 == 1  # type: ignore[arg-type]


def test_every_fate_is_counted(client: Client, namespace: str) -> None:
    options = {"namespace": namespace, "max_staleness": 3, "tags": ["level"], "max_deliveries": 1}
    stream = ExperienceStream(client, "math", filters=[odd], **options)  # type: ignore[arg-type]
    other = ExperienceStream(client, "math", **options)  # type: ignore[arg-type]
    with stream, other:
        stream.put(numbered(2, policy_version=9))
        late = str(refused(stream))
        assert "since this consumer group joined; 1 were put before, of which 1 were" in late
        assert "check the filters" in late
        stream.put(numbered(4, policy_version=9))
        assert "Of 1 groups put: 1 were filtered at put. Filters drop" in str(refused(stream))
        stream.put_many([[numbered(n, policy_version=9)] for n in (1, 3, 5, 7, 9, 11)])
        mine = stream.take(3, timeout=0)
        stream.take(1, timeout=0).ack()
        theirs = other.take(1, timeout=0)
        stream.take(1, timeout=0).reject("broken")
        stream.put(numbered(13, policy_version=9, tags={"level": 1}))
        stream.put(numbered(15, policy_version=9, status=Status.ABORTED))
        stream.put(numbered(17, policy_version=1))
        stream.advance(9)
        error = refused(stream, where={"level": 2})
        assert error.fates == {
            "put_ever": 11, "filtered_ever": 2, "put": 10, "available": 0, "unmatched": 1,
            "other_status": 1,
            "leased_here": 3, "leased_elsewhere": 1, "acked": 1, "expired": 1, "filtered": 1,
            "evicted": 0, "dead": 1,
        }  # fmt: skip
        for part in (
            "1 do not match the query, 1 have another status, 3 are leased by this consumer",
            "1 are leased by other consumers, 1 are acknowledged, 1 expired as too stale",
            "1 were filtered at put, 1 are dead letters.",
        ):
            assert part in str(error)
        assert "release the leases of this consumer" in str(refused(stream, 3))
        mine.release([mine.ids[0]])
        assert refused(stream).fates["leased_here"] == 2
        mine.ack()
        assert refused(stream).fates["leased_here"] == 0
        theirs.release()
        assert refused(other).fates["available"] == 3


def test_a_batch_that_one_request_acknowledges_is_no_longer_leased(
    client: Client, namespace: str
) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        stream.put_many([[numbered(n)] for n in range(3)])
        first = stream.take(1, timeout=0)
        second = stream.take(2, timeout=0, ack=first)
        assert refused(stream).fates["leased_here"] == 2
        second.ack()
        assert "3 are acknowledged" in str(refused(stream))


def test_an_unused_task_is_named_with_similar_ones(client: Client, namespace: str) -> None:
    for task in ("math", "Math2", "code"):
        with ExperienceStream(client, task, namespace=namespace) as stream:
            stream.put(numbered(1))
    for foreign in (b"math\xff", b"math 2", b"math:"):  # keys that redrb does not write
        client.execute("HSET", b"redrb:{%b:%b}:puts" % (namespace.encode(), foreign), "put", 1)
    with (
        ExperienceStream(client, "maht", namespace=namespace) as unused,
        ExperienceStream(client, "mathe", namespace=namespace) as late,  # also without groups
    ):
        error = refused(unused)
        assert error.similar == ("math", "Math2", "code")
        assert "Nobody has ever put into this task" in str(error)
        assert "groups: 'math', 'Math2', 'code'." in str(error)
        late.put(numbered(1))
        assert refused(late).similar == ()
        with ExperienceStream(client, "mathe", namespace=namespace, group="new") as joined:
            joined.join_group(start="newest")
            assert "since this consumer group joined" in str(refused(joined))


def test_a_look_at_an_unused_task_searches_once(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExperienceStream(client, "math", namespace=namespace) as stream:
        refused(stream)
        searched = stream._task._similar
        refused(stream)
        assert stream._task._similar is searched
