"""What `connect` is given, checked before anything is reached."""

import math
import uuid

import pytest

import redrb
from redrb.errors import ConfigError, StoreUnavailable


@pytest.mark.parametrize("wrong", ["5", -0.5, None, True, math.nan])
@pytest.mark.parametrize("which", ["retry_s", "connect_timeout"])
@pytest.mark.parametrize("url", ["fake://arguments", "redis://127.0.0.1:1"])
def test_seconds_are_numbers(url, which, wrong):
    with pytest.raises(ConfigError, match=f"{which}="):
        redrb.connect(url, **{which: wrong})


def test_a_server_is_given_some_time_to_answer():
    for wrong in (0, math.inf, 1e30):
        with pytest.raises(ConfigError, match="connect_timeout="):
            redrb.connect("redis://127.0.0.1:1", connect_timeout=wrong)


@pytest.mark.parametrize("right", [0, 0.2, 3, math.inf])
def test_requests_are_repeated_for_any_time(right):
    with redrb.connect(f"fake://{uuid.uuid4().hex}", retry_s=right) as client:
        assert client.retry_s == right


@pytest.mark.parametrize("url", [7, b"redis://127.0.0.1:1", ["redis://127.0.0.1:1"]])
def test_a_url_is_a_string(url):
    with pytest.raises(ConfigError, match="pass a string"):
        redrb.connect(url)


@pytest.mark.parametrize("wrong", ["1", -1, 0.5, None, True])
def test_min_replicas_is_a_number(wrong):
    with pytest.raises(ConfigError, match="min_replicas="):
        redrb.connect("redis://127.0.0.1:1", min_replicas=wrong)


def test_a_server_without_replicas_confirms_nothing():
    with pytest.raises(ConfigError, match="fake:// has no replicas"):
        redrb.connect(f"fake://{uuid.uuid4().hex}", min_replicas=1)


def test_errors_name_the_variable_that_has_the_url(tmp_path, monkeypatch):
    url = f"unix://{tmp_path}/no.sock"
    monkeypatch.setenv("REDRB_URL", url)
    for given in (None, url):  # commands read the variable themselves
        with pytest.raises(
            StoreUnavailable, match=r"is that of the environment variable REDRB_URL"
        ):
            redrb.connect(given)
    with pytest.raises(StoreUnavailable) as caught:
        redrb.connect(f"{url}2")
    assert "REDRB_URL" not in str(caught.value)
    assert "`redrb server DIRECTORY`" in str(caught.value)
    assert "firewall" not in str(caught.value)
    monkeypatch.setenv("REDRB_URL", "http://host")
    with pytest.raises(ConfigError, match=r"unknown scheme.* variable REDRB_URL"):
        redrb.connect()
