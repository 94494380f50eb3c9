"""Settings of a task and options of a stream are checked before any request to Redis."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import redrb
from redrb import BufferItem, ConfigError, ExperienceStream
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
        ({"on_expired": "burn"}, 'on_expired=\'burn\': use "discard" or "keep"'),
        ({"max_waiting": -1}, "max_waiting=-1"),
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
    ("options", "match"),
    [
        ({"filters": [redrb.reward_variance]}, r"filters=\[reward_variance\(\.\.\.\)\]"),
        ({"filters": [redrb.finite_rewards]}, r"call it"),
        ({"filters": [Filter]}, r"filters=\[Filter\(\.\.\.\)\]"),
        ({"filters": "all"}, "give a list"),
        ({"filters": 3}, "give a list"),
        ({"lease_ms": "30"}, "lease_ms"),
        ({"lease_ms": 99}, "lease_ms=99: it must be an int, at least 100"),
        (
            {"on_full": "wait"},
            'on_full=\'wait\': use "block", "drop_oldest", "drop_stalest"',
        ),
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


def test_an_unknown_argument_is_named_with_the_known_settings(client: Client) -> None:
    with pytest.raises(
        ConfigError, match=r"'max_stalness'; the settings of a task are .*max_stale"
    ):
        ExperienceStream(client, "math", max_stalness=2)
