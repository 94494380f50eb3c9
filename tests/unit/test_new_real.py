"""Recipes for real models that `redrb new grpo` writes."""

import ast
import asyncio
import json
import re
import shlex
import subprocess

import pytest
import torch

from redrb.cli import __main__ as cli
from redrb.recipe import Completion, character_tokenizer
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load
from tests.tools import need

ROWS = [{"problem": f"{n} and {n}?", "solution": f"#### {2 * n}"} for n in range(80)]
CODE = [{"text": "Add.", "test_list": ["assert add(1, 2) == 3"]}] * 80


def written(tmp_path, monkeypatch, *words, rows=ROWS, name="sums.py"):
    """Write a recipe; return its class, and its text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = ["--model", "org/Model-0.5B-Instruct", "--dataset", "rows.jsonl", *words]
    assert cli.main(["new", "grpo", name, *arguments]) == 0
    return load(name)[0], (tmp_path / name).read_text()


def scored(recipe, text, row):
    tokenizer = character_tokenizer(text)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    found = recipe.reward(Completion(row, ids, ids, True, decode))
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


@pytest.mark.parametrize("engine", ["vllm", "sglang", "local"])
@pytest.mark.parametrize("reward", ["boxed", "exact"])
def test_a_recipe_has_the_rows_and_scores_them(tmp_path, monkeypatch, engine, reward):
    kind, _ = written(tmp_path, monkeypatch, "--engine", engine, "--reward", reward)
    recipe = kind()
    assert (kind.__name__, recipe.engine) == ("Sums", engine)
    assert recipe.model() == "org/Model-0.5B-Instruct"
    assert (len(recipe.prompts()), len(recipe.held_out())) == (16, 64)
    row = recipe.prompts()[3]
    [message] = row["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("3 and 3?\n")
    right, wrong = (r"so \boxed{6}", "6") if reward == "boxed" else ("6", r"\boxed{6}")
    assert scored(recipe, right, row) == 1.0
    assert scored(recipe, wrong, row) == 0.0


def test_a_file_with_tests_gets_a_reward_of_tests(tmp_path, monkeypatch):
    kind, _ = written(tmp_path, monkeypatch, rows=CODE)
    recipe = kind()
    row = recipe.prompts()[0]
    assert scored(recipe, "```python\ndef add(a, b): return a + b\n```", row) == 1.0
    assert scored(recipe, "```python\ndef add(a, b): return a * b\n```", row) == 0.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "local"])
def test_the_commands_in_its_header_are_understood(tmp_path, monkeypatch, engine):
    _, text = written(tmp_path, monkeypatch, "--engine", engine)
    header = ast.get_docstring(ast.parse(text))
    script = "\n".join(re.findall(r"^(?:  .*\n)+", header, re.MULTILINE))
    checked = subprocess.run([need("bash"), "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    commands = script.replace("\\\n", " ").splitlines()
    served = [each for each in commands if "serve" in each or "launch_server" in each]
    assert all(
        ("vllm serve" in each) == (engine == "vllm") for each in served if "redrb" not in each
    )
    found = []
    for line in commands:
        program = next(
            (each for each in ("redrb run", "redrb-maker", "processes.trainer") if each in line),
            None,
        )
        if program:
            words = shlex.split(
                line.partition(program)[2].replace("&", "").replace("$n", "1").replace("; done", "")
            )
            name = {"processes.trainer": "redrb-trainer", "redrb run": "redrb-maker"}.get(
                program, program
            )
            if program == "redrb run":
                words = words[: words.index("--makers")]
            found.append(parse(name, None, words).recipe)
    assert [each.shard for each in found] == [False, False, True, True]
    url = "http://localhost:8000" if engine == "local" else "http://localhost:8001"
    assert found[1].engine_url == url


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "--model", "m"], "redrb new grpo --model --dataset"),
        (["ppo", "--model", "m", "--dataset", "rows.jsonl"], "redrb new grpo --model --dataset"),
        (["grpo", "--model", "m", "--dataset", "none.jsonl"], "none.jsonl cannot be read"),
        (
            ["grpo", "--model", "m", "--dataset", "rows.jsonl", "--reward", "tests"],
            "has the columns problem, solution, and none of tests, test, test_list",
        ),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    assert cli.main(["new", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "my_recipe.py").exists()


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("redrb.cli.new.find_spec", lambda _name: None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "grpo", "--model", "m", "--dataset", "org/rows"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "my_recipe.py is written." in lines[0]
    needed = [line.split()[2] for line in lines[1:]]
    assert needed == ["transformers", "accelerate", "aiohttp", "datasets"]


def test_a_model_without_a_chat_template_is_named(tmp_path, monkeypatch):
    kind, _ = written(tmp_path, monkeypatch)
    recipe = kind()
    object.__setattr__(recipe, "tokenizer", character_tokenizer("abc"))
    with pytest.raises(Exception, match="no chat template"):
        recipe.encode(recipe.prompts()[0])


def test_the_file_may_stand_behind_the_flags(tmp_path, monkeypatch, capsys):
    written(tmp_path, monkeypatch)
    words = ["new", "grpo", "--model", "m", "--dataset", "rows.jsonl"]
    assert cli.main([*words, "last.py"]) == 0
    assert "'m'" in (tmp_path / "last.py").read_text().replace('"', "'")
    for more in (["a.py", "b.py"], ["c.py", "--json", "d.py"]):
        with pytest.raises(SystemExit):
            cli.main([*words[:2], *more[:1], *words[2:], *more[1:]])
        assert "there is no place for the argument" in capsys.readouterr().err
