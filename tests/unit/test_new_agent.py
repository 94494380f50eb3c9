"""The recipe of an agent that `redrb new agent` writes."""

import ast
import asyncio
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from redrb.cli import __main__ as cli
from redrb.recipe import AgentRecipe
from redrb.recipe.command_line import parse
from redrb.recipe.loading import load
from tests.tools import need

ROWS = [{"problem": f"{n} and {n}?", "solution": f"#### {2 * n}"} for n in range(80)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


class Scripted:
    """A session whose model answers as a test says, and what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def chat(self, messages, **options):
        self.asked.append(([*messages], options))
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return {"role": "assistant", "content": answer}
        name, arguments = answer if isinstance(answer, tuple) else ("calculate", answer)
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": function}],
        }


def written(tmp_path, monkeypatch, *words, name="sums.py"):
    """Write a recipe; return its class, and its text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    assert cli.main(["new", "agent", name, *words]) == 0
    return load(name)[0], (tmp_path / name).read_text()


def rewarded(recipe, *answers, prompt=None):
    """Return the reward of an episode, and what the model was asked last."""
    session = Scripted(*answers)
    prompt = prompt or {"question": "What is 6 * 7?", "answer": "42"}
    return asyncio.run(recipe.agent(prompt, session)), session.asked[-1]


def test_its_agent_calls_the_tool_and_is_rewarded_for_the_right_answer(tmp_path, monkeypatch):
    kind, _ = written(tmp_path, monkeypatch, "--model", "org/Model")
    recipe = kind(largest=3)
    assert (kind.__name__, recipe.model(), issubclass(kind, AgentRecipe)) == (
        "Sums",
        "org/Model",
        True,
    )
    assert {"question": "What is 2 * 3?", "answer": "6"} in recipe.prompts()
    assert len(recipe.prompts()) == 9
    call = {"a": 6, "operator": "*", "b": 7}
    reward, (messages, options) = rewarded(recipe, call, r"So \boxed{42}.")
    assert reward == 1.0
    assert messages[-1] == {"role": "tool", "tool_call_id": "1", "content": "42"}
    assert options["tools"][0]["function"]["name"] == "calculate"
    assert rewarded(recipe, call, r"\boxed{41}")[0] == 0.0
    assert rewarded(recipe, "42")[0] == 0.0
    assert rewarded(recipe, *[call] * recipe.most_turns)[0] == 0.0  # it never answers


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"a": 1, "operator": "/", "b": 0}, "ZeroDivisionError"),
        ({"a": 1, "operator": "**", "b": 9}, "KeyError"),
        ({"a": "x" * 10, "operator": "*", "b": 10**12}, "ValueError"),
        ({"a": 10**400, "operator": "*", "b": 1}, "OverflowError"),
        ({"a": [1], "operator": ["*"], "b": 1}, "TypeError"),
        ([1, 2], "TypeError"),
        ({"operator": "*"}, "TypeError"),
    ],
)
def test_a_call_that_cannot_be_calculated_is_answered(tmp_path, monkeypatch, call, said):
    kind, _ = written(tmp_path, monkeypatch)
    _, (messages, _) = rewarded(kind(), call, "no")
    assert messages[-1]["content"].startswith(said)


def test_each_tool_is_told_and_called_by_its_name(tmp_path, monkeypatch):
    kind, _ = written(tmp_path, monkeypatch)

    def double(word):
        """Writes a word twice."""
        return 2 * word

    kind.agent.__globals__["TOOLS"]["double"] = (double, {"word": {"type": "string"}})
    _, (messages, options) = rewarded(kind(), ("double", {"word": "ha"}), ("halve", {}), "no")
    given = [each["function"] for each in options["tools"]]
    assert [each["name"] for each in given] == ["calculate", "double"]
    assert given[1]["description"] == "Writes a word twice."
    assert given[1]["parameters"]["required"] == ["word"]
    results = [each["content"] for each in messages if each["role"] == "tool"]
    assert results == ["haha", "KeyError: 'halve'"]


def test_the_reward_is_shown_after_each_step(tmp_path, monkeypatch):
    kind, _ = written(tmp_path, monkeypatch)
    assert kind().evaluate_every == 1


def test_its_harness_has_at_most_40_lines(tmp_path, monkeypatch):
    kind, text = written(tmp_path, monkeypatch)
    begin, end = text.index("OPERATORS ="), text.index("class Sums")
    harness = text[begin:end] + inspect.getsource(kind.agent)
    assert len([line for line in harness.splitlines() if line.strip()]) <= 40


def test_the_rows_of_a_data_set_are_its_questions(tmp_path, monkeypatch):
    kind, text = written(tmp_path, monkeypatch, "--dataset", "rows.jsonl")
    assert kind().prompts()[3] == {"question": "3 and 3?", "answer": "6"}
    assert "largest" not in text


@pytest.mark.parametrize("words", [[], ["--model", "org/Model", "--dataset", "rows.jsonl"]])
def test_the_commands_in_its_header_are_understood(tmp_path, monkeypatch, words):
    _, text = written(tmp_path, monkeypatch, *words)
    script = "\n".join(
        re.findall(r"^(?:  .*\n)+", ast.get_docstring(ast.parse(text)), re.MULTILINE)
    )
    checked = subprocess.run([need("bash"), "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    runs = re.findall(r"redrb run (.*)", script)
    assert len(runs) == 2
    for each in runs:
        found = shlex.split(each.replace("--makers 1", "").replace("examples/agent", str(EXAMPLE)))
        recipe = parse("redrb-maker", None, found).recipe if not words else None
        assert recipe is None or recipe.engine == "vllm"
    needs = ("--enable-scale-out", "--tool-call-parser", '"backend": "redrb"', "processed_logprobs")
    assert [script.count(each) for each in needs] == [2] * 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "sglang"], "leave --engine out: only vLLM samples"),
        (["--reward", "boxed"], "leave --reward out: an agent returns its reward itself"),
        (["--dataset", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "agent", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "my_recipe.py").exists()


def test_missing_packages_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("redrb.cli.new.find_spec", lambda _name: None)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "agent", "--dataset", "org/rows"]) == 0
    needed = [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert needed == ["transformers", "accelerate", "aiohttp", "starlette", "datasets"]


def test_the_small_model_writes_what_the_agent_reads(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import small_model

    kind, _ = written(tmp_path, monkeypatch)
    words, texts = small_model.tokenizer(), small_model.shown(6, 7)
    call = json.loads(re.search(r"\{.*\}", texts[1])[0])
    assert call["name"] == "calculate"
    answer = texts[3].removesuffix("<eos>")
    reward, (messages, options) = rewarded(kind(), call["arguments"], answer)
    assert reward == 1.0
    given = words.apply_chat_template(messages, tokenize=False, **options)
    assert given.startswith(texts[0])
    assert given.endswith(texts[2])
    for text in texts:
        assert words.decode(words(text)["input_ids"]) == text
    sys.modules.pop("small_model")
