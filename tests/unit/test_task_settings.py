"""Settings of a task and options of a stream are checked before any request to Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import redrb
from redrb import BufferItem, ConfigError, ExperienceStream, RateLimit
from redrb.connection import Client
from redrb.stream import TaskSettings
from redrb.stream.orders import Stalest
from redrb.stream.task.settings import SettingArguments
from tests.samples import numbered, numbers


@pytest.fixture
def client() -> Iterator[Client]:
    with redrb.connect(f"fake://{uuid.uuid4().hex}") as client:
        yield client


class Filter:
    def __call__(self, _: Sequence[BufferItem]) -> bool:
        return True


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"order": "random"}, "unknown order 'random'"),
        *(({"order": no}, "an order is a name, or an object") for no in (7, Stalest, object())),
        ({"limit": -1}, "limit=-1: it must be an int, at least 0"),
        ({"limit": "5"}, "limit='5'"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"max_bytes": True}, "max_bytes=True"),
        ({"max_deliveries": 0}, "max_deliveries=0: it must be an int, at least 1"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"max_token_staleness": 1.5}, "max_token_staleness=1.5"),
        ({"max_reads": -1}, "max_reads=-1"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 3, "limit": 3}, "a limit .* or a capacity"),
        ({"eviction": "first"}, 'eviction=\'first\': use "oldest", "stalest" or "last"'),
        ({"on_expired": "burn"}, 'on_expired=\'burn\': use "discard" or "keep"'),
        ({"rate": 4.0}, "redrb.RateLimit"),
        ({"rate": RateLimit.ratio(4, min_size=1, error_buffer=9)}, "taken 1 times"),
        ({"rate": RateLimit.at_least(9), "limit": 5}, "min_size=9 can never be stored"),
        ({"rate": RateLimit.at_least(9), "capacity": 5}, "with capacity=5"),
        ({"rate": RateLimit(1.0, 1, 4.0, 9.0), "limit": 4}, "no take before 5 groups"),
        ({"rate": RateLimit(2.0, 1, 7.0, 99.0), "capacity": 3, "max_reads": 2}, "at least 4"),
        ({"rate": RateLimit(0.5, 1, -9.0, 9.0), "limit": 64}, "fill the limit at last"),
        ({"rate": RateLimit.queue(4), "partitions": 2}, "with partitions= leave it out"),
        ({"tags": "source"}, "tags='source' is no list"),
        ({"tags": ["a", "a"]}, "names a twice"),
        ({"tags": [f"t{n}" for n in range(33)]}, "at most 32"),
        ({"tags": ["a b"]}, "tag 'a b'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TaskSettings(**settings).as_stored()


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": RateLimit(1.0, 1, 4.0, 9.0), "limit": 5},
        {"rate": RateLimit(2.0, 1, 7.0, 99.0), "capacity": 3, "max_reads": 0},
        {"rate": RateLimit(2.0, 1, 7.0, 99.0), "limit": 4, "max_reads": 2},
        {"rate": RateLimit.at_least(3), "limit": 3, "max_reads": 2},
    ],
)
def test_settings_at_the_bound_are_not_refused(settings: dict[str, Any]) -> None:
    TaskSettings(**settings).as_stored()


@pytest.mark.parametrize(
    ("samples_per_insert", "min_diff", "max_diff", "blocks"),
    [(0.5, 0.0, 0.5, True), (0.5, 0.0, 1.0, False), (1.0, 0.0, 1.0, False), (2.5, 0.3, 3.2, True)],
)
def test_a_rate_is_refused_exactly_where_both_sides_can_block(
    samples_per_insert: float, min_diff: float, max_diff: float, *, blocks: bool
) -> None:
    reached, blocked = {0.0}, False
    for _ in range(60):
        reached |= {
            round(after, 9)
            for at in reached
            for after in (at + samples_per_insert, at - 1)
            if min_diff <= after <= max_diff or 0 <= after < min_diff
        }
    for at in reached:
        blocked |= at + samples_per_insert > max_diff + 1e-6 and at - 1 < min_diff - 1e-6
    assert blocked is blocks
    if blocks:
        with pytest.raises(ConfigError, match="neither a put nor a take fits"):
            RateLimit(samples_per_insert, 1, min_diff, max_diff)
    else:
        RateLimit(samples_per_insert, 1, min_diff, max_diff)


def test_rates_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="not even one group"):
        RateLimit.ratio(4.0, min_size=1, error_buffer=1.0)
    with pytest.raises(ConfigError, match="samples_per_insert"):
        RateLimit(0.0, 1, 0.0, 1.0)
    with pytest.raises(ConfigError, match="min_size"):
        RateLimit.at_least(0)
    with pytest.raises(ConfigError, match="min_size=11 can never be stored"):
        RateLimit(1.0, 11, 0.0, 10.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"filters": [redrb.reward_variance]}, r"filters=\[reward_variance\(\.\.\.\)\]"),
        ({"filters": [redrb.finite_rewards]}, r"call it"),
        ({"filters": [Filter]}, r"filters=\[Filter\(\.\.\.\)\]"),
        ({"filters": "all"}, "give a list"),
        ({"filters": 3}, "give a list"),
        ({"lease_ms": "30"}, "lease_ms"),
        ({"lease_ms": 99}, "lease_ms=99: it must be an int, at least 100"),
        ({"on_full": "wait"}, 'on_full=\'wait\': use "block", "drop_oldest" or "error"'),
        ({"limit": -1}, "limit=-1"),
        ({"settings": {"limit": 4}}, r"redrb\.stream\.TaskSettings"),
        ({"task": "a b"}, "task 'a b'"),
        ({"task": ""}, "task ''"),
        ({"task": "x{y}"}, "task 'x{y}'"),
        ({"group": "a b"}, "consumer group 'a b'"),
        ({"group": None}, "consumer group None"),
        ({"namespace": 3}, "namespace 3"),
        ({"namespace": "a:b"}, "namespace 'a:b'"),
        ({"weights": "a b"}, "weights 'a b'"),
    ],
)
def test_bad_options_of_a_stream_are_refused_and_nothing_is_created(
    client: Client, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        ExperienceStream(client, **{"task": "math", **options})
    assert client.execute("DBSIZE") == 0


@pytest.mark.parametrize("given", ["redis://u:secret@host", None, 3])
def test_a_client_that_is_none_is_refused_without_its_text(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"redrb\.connect") as caught:
        ExperienceStream(given, "math")
    assert "secret" not in str(caught.value)


def test_settings_may_be_given_whole_and_keywords_replace_them(client: Client) -> None:
    settings = TaskSettings(order="lifo", limit=4, tags=["source"])
    with ExperienceStream(client, "math", settings=settings, limit=3, on_full="error") as stream:
        stream.put_many([[numbered(n)] for n in range(3)], tags={"source": "a"})
        assert stream.stats().limit == 3
        assert numbers(stream.take(3, timeout=0, where={"source": "a"})) == [2, 1, 0]


def test_every_setting_is_a_keyword_of_a_stream() -> None:
    assert list(get_type_hints(SettingArguments)) == [each.name for each in fields(TaskSettings)]


@pytest.mark.parametrize("partitions", [1, 2])
def test_an_unknown_argument_is_named_with_the_known_settings(
    client: Client, partitions: int
) -> None:
    with pytest.raises(
        ConfigError, match=r"'max_stalness'; the settings of a task are .*max_stale"
    ):
        ExperienceStream(client, "math", partitions=partitions, max_stalness=2)
