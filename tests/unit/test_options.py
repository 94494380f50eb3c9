"""Settings from flags and variables, and what happens to those out of range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import pytest

from redrb.cli import __main__ as cli
from redrb.cli.processes import maker, trainer
from redrb.cli.run.demo import DemoSettings
from redrb.environment import child_environment
from redrb.errors import ConfigError
from redrb.options import add_options, settings_from
from redrb.recipe.examples.sorting import Sorting
from redrb.recipe.job_settings import JobSettings, MakerSettings, TrainerSettings

ALL = (DemoSettings, JobSettings, MakerSettings, Sorting, TrainerSettings)


def test_a_flag_goes_before_a_variable_and_a_variable_before_the_default(monkeypatch):
    monkeypatch.setenv("REDRB_PROMPTS_PER_STEP", "5")
    monkeypatch.setenv("REDRB_MAKER_STEPS", "6")
    parser = argparse.ArgumentParser()
    add_options(parser, MakerSettings)
    made = settings_from(parser.parse_args(["--maker-steps", "7"]), MakerSettings)
    assert (made.prompts_per_step, made.maker_steps, made.weights_timeout) == (5, 7, 120.0)


@pytest.mark.parametrize(
    ("variable", "flags", "expected"),
    [
        (None, [], False),
        (None, ["--in-flight-updates"], True),
        (None, ["--in-flight-updates", "yes"], True),
        ("true", [], True),
        ("1", ["--in-flight-updates", "No"], False),
        ("0", [], False),
    ],
)
def test_yes_and_no(monkeypatch, variable, flags, *, expected):
    if variable is not None:
        monkeypatch.setenv("REDRB_IN_FLIGHT_UPDATES", variable)
    parser = argparse.ArgumentParser()
    add_options(parser, MakerSettings)
    made = settings_from(parser.parse_args(flags), MakerSettings)
    assert made.in_flight_updates is expected


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("redis://maker:hunter2@host:6379/0", True),
        ("rediss+cluster://:hunter2@host,other", True),
        ("unix://maker:hunter2@/run/redis.sock", True),
        ("redis://:hunt/er?2@host", True),
        ("redis://host?password=hunter2", True),
        ("rediss://host?ssl_keyfile=k&ssl_password=hunter2", True),
        ("redis+sentinel://host,other/main/0?sentinel_password=hunter2", True),
        ("redis://host:6379/0", False),
        ("redis://maker@host:6379/0", False),
        ("redis://[::1]:6379/0?client_name=a", False),
        ("unix:///run/redis.sock", False),
        ("embedded:///data", False),
    ],
)
def test_a_flag_takes_no_password_and_the_variable_does(monkeypatch, capsys, url, *, secret):
    monkeypatch.setenv("REDRB_URL", url)
    parser = argparse.ArgumentParser()
    add_options(parser, JobSettings)
    assert settings_from(parser.parse_args([]), JobSettings).url == url
    if not secret:
        assert parser.parse_args([f"--url={url}"]).url == url
        return
    programs: list[tuple[Callable[[list[str]], int], list[str]]] = [
        (maker.main, ["sorting"]),
        (trainer.main, ["sorting"]),
        *((cli.main, words) for words in (["demo"], ["stats", "math"], ["weights", "ls"])),
    ]
    for program, words in programs:
        with pytest.raises(SystemExit) as caught:
            program([*words, f"--url={url}"])
        assert caught.value.code == 2
        message = capsys.readouterr().err
        assert "REDRB_URL" in message
        assert "hunt" not in message


@pytest.mark.parametrize(
    "program",
    [
        lambda _: maker.main(["sorting"]),
        lambda _: trainer.main(["sorting"]),
        lambda _: cli.main(["demo"]),
    ],
)
def test_programs_connect_with_the_replicas_of_the_variable(monkeypatch, capsys, tmp_path, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDRB_URL", "fake://replicas")
    monkeypatch.setenv("REDRB_MIN_REPLICAS", "2")
    assert program([]) == 2
    assert "min_replicas=2: fake:// has no replicas" in capsys.readouterr().err


def test_neither_yes_nor_no_is_refused(capsys):
    parser = argparse.ArgumentParser()
    add_options(parser, MakerSettings)
    with pytest.raises(SystemExit):
        parser.parse_args(["--in-flight-updates", "perhaps"])
    assert "neither yes nor no" in capsys.readouterr().err


@pytest.mark.parametrize("owner", ALL)
def test_defaults_are_in_range(owner):
    owner()


@pytest.mark.parametrize(
    ("owner", "values", "message"),
    [
        (TrainerSettings, {"publish_every": 0}, r"--publish-every .*REDRB_PUBLISH_EVERY.* least 1"),
        (TrainerSettings, {"evaluate_every": 0}, "--evaluate-every"),
        (TrainerSettings, {"groups": 0}, "--groups"),
        (TrainerSettings, {"steps": -1}, "--steps"),
        (TrainerSettings, {"max_seconds": math.nan}, "--max-seconds"),
        (TrainerSettings, {"lease_ms": 99}, "--lease-ms .* at least 100"),
        (TrainerSettings, {"idle_timeout": -1.0}, "--idle-timeout"),
        (JobSettings, {"threads": 0}, "--threads"),
        (JobSettings, {"seed": 2**63}, "--seed .* at most"),
        (JobSettings, {"limit": -1}, "--limit"),
        (JobSettings, {"min_replicas": -1}, r"--min-replicas .*REDRB_MIN_REPLICAS"),
        (JobSettings, {"namespace": "a:b"}, "--namespace 'a:b'"),
        (JobSettings, {"weights": "a b"}, "--weights"),
        (MakerSettings, {"prompts_per_step": 0}, "--prompts-per-step"),
        (MakerSettings, {"weights_timeout": -0.1}, "--weights-timeout"),
        (MakerSettings, {"group_size": 0}, "--group-size"),
        (Sorting, {"gamma": 1.1}, "--gamma .* at most 1"),
        (Sorting, {"clip": 0.0}, "--clip .* more than 0"),
        (DemoSettings, {"makers": 0}, "--makers"),
        (DemoSettings, {"max_seconds": 0.0}, "--max-seconds"),
    ],
)
def test_a_value_out_of_range_is_named(owner, values, message):
    with pytest.raises(ConfigError, match=message):
        owner(**values)


def test_a_child_inherits_no_variables_with_the_excluded_prefix(monkeypatch):
    monkeypatch.setenv("REDRB_TASK", "other")
    monkeypatch.setenv("OTHER_TASK", "other")
    assert child_environment()["REDRB_TASK"] == "other"
    child = child_environment(without="REDRB_", REDRB_URL="redis://here")
    assert {name for name in child if name.startswith("REDRB_")} == {"REDRB_URL"}
    assert child["OTHER_TASK"] == "other"


@pytest.mark.parametrize(
    ("words", "dest", "values"),
    [
        (["inspect", "math", "--namespace", "x", "1", "2"], "ids", ["1", "2"]),
        (["inspect", "--full", "math", "1", "--json", "2", "--dead", "3"], "ids", ["1", "2", "3"]),
        (["inspect", "math", "--full"], "ids", []),
        (["dead", "requeue", "math", "--namespace", "x", "1"], "ids", [1]),
        (["dead", "drop", "math", "--yes", "1"], "ids", [1]),
        (["stats", "math", "--json", "code"], "task", ["math", "code"]),
        (["set", "math", "--json", "limit=3"], "settings", ["limit=3"]),
    ],
)
def test_words_of_a_list_may_stand_between_flags(words, dest, values):
    assert getattr(cli._parser().parse_args(words), dest) == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "sorting", "--grops", "3"],
            "redrb run: there is no flag --grops; did you mean --groups or --group-size? Help: ",
        ),
        (
            ["ls", "--jsn=x"],
            "redrb ls: there is no flag --jsn; did you mean --json? Help: ",
        ),
        (["ls", "--xyz"], "redrb ls: there is no flag --xyz. Help: redrb ls --help\n"),
        (["ls", "more"], "redrb ls: there is no place for the argument 'more'. Help: redrb ls"),
        (["dead", "drop", "a", "b"], "redrb dead drop: argument ID: invalid int value: 'b'."),
        (["inspect", "a", "1", "--xyz", "2"], "redrb inspect: there is no flag --xyz. Help: "),
        (
            ["stats"],
            "redrb stats: the following arguments are required: TASK. `redrb ls --namespace NAME`",
        ),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong_and_where_help_is(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1
