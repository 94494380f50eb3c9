"""Requests of agents: what counts in a history, and what follows a reply in real chat templates."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from redrb.gateway.chat import _changed, following
from redrb.gateway.messages import (
    MOST_DEPTH,
    Refused,
    ask_of,
    beginnings,
    extended,
    histories,
    text_digest,
)
from redrb.gateway.replies import Reply

USER = {"role": "user", "content": "hi"}


def ask(protocol: Any = "chat", **body: Any) -> Any:
    whole = {"model": "m", "messages": [USER], **body}
    return ask_of(protocol, json.dumps(whole).encode())


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
        ({"content": "a"}, {"content": "a", "reasoning": "b", "refusal": None, "audio": None}),
        ({"content": "a"}, {"content": "a", "tool_calls": [], "annotations": []}),
        ({"tool_calls": [call('{"a":1,"b":2}')]}, {"tool_calls": [call('{ "b": 2, "a": 1 }')]}),
        ({"tool_calls": [call("no JSON")]}, {"tool_calls": [{"index": 0, **call("no JSON")}]}),
        (
            {"content": "a", "tool_calls": [call('{"a": 1}')]},
            {
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": ""},
                    {"type": "text", "text": "a", "citations": None},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "caller": {}},
                ]
            },
        ),
    ],
)
def test_what_sdks_change_is_no_edit(one, other):
    assert extended(b"", {"role": "assistant", **one}) == extended(
        b"", {"role": "assistant", **other}
    )


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a "},
        {"role": "assistant", "content": "a", "name": "x"},
        {"role": "assistant", "content": "a", "new_field": 1},
        {"role": "assistant", "content": "a", "tool_calls": [call("{}")]},
    ],
)
def test_what_changes_a_history_is_an_edit(other):
    assert extended(b"", {"role": "assistant", "content": "a"}) != extended(b"", other)


def test_a_history_begins_with_tools_and_system():
    plain = histories(ask())
    assert histories(ask(temperature=0.5, stop="x", stream=True)) == plain
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert histories(ask(tools=tools))[0] != plain[0]
    assert histories(ask(chat_template_kwargs={"a": 1}))[0] != plain[0]
    text = {"type": "text", "text": "s"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: 1"}
    system = [
        histories(ask("messages", system=each))[0] for each in ("s", [text], [billing, text], "t")
    ]
    assert system[0] == system[1] == system[2] != system[3]


def test_a_request_is_the_same_however_its_reply_is_sent():
    assert ask().request == ask(stream=True, stream_options={"include_usage": True}).request
    assert ask().request != ask(seed=1).request
    assert ask().request != ask("messages").request
    data = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert ask_of("chat", data, key="a").request != ask_of("chat", data, key="b").request


def test_a_body_has_a_bound_of_depth():
    def nested(levels: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return {"metadata": value}

    ask(**nested(MOST_DEPTH - 1))
    with pytest.raises(Refused, match=f"{MOST_DEPTH} levels"):
        ask(**nested(MOST_DEPTH))
    deep = "[" * 5000 + "]" * 5000
    extended(b"", {"role": "assistant", "tool_calls": [call(deep)]})  # a text that is no JSON
    below = "[" * 900 + "]" * 900
    extended(b"", {"role": "assistant", "tool_calls": [call(below)]})


@pytest.mark.parametrize("text", ["aéb", "aé", "aeb", "a"])
def test_a_text_begins_with_the_same_bytes(text):
    begins = ["aé", "aéb", "a", "aéb"]
    digests = [bytes(16), b"\xff" * 16, b"", *map(text_digest, begins)]
    found = beginnings(text.encode(), digests)
    assert {each: found.get(text_digest(each), 0) for each in begins} == {
        each: len(each.encode()) if text.startswith(each) else 0 for each in begins
    }
    assert found.keys().isdisjoint(digests[:2])


def test_arguments_that_are_no_object_reach_an_agent_of_anthropic_and_come_back():
    message = {"role": "assistant", "content": "", "tool_calls": [call("[1")]}
    stored = {"id": "1", "created": 1, "message": message, "finish": "tool_calls", "stop": None}
    reply = Reply(ask("messages"), {**stored, "usage": [1, 1]})
    body = reply.body()
    assert body["content"][0]["input"] == {"arguments": "[1"}
    back = {"role": body["role"], "content": body["content"]}
    assert extended(b"", back) == extended(b"", reply.message)


# --- what follows a reply, in the templates that TRL brings

_found = find_spec("trl")
_FOLDER = Path(str(_found.origin if _found else "")).parent / "chat_templates"
_TOKEN = re.compile(r"(<[^<>\s]{1,40}>|.)", re.DOTALL)
_CALLS = [{**call(""), "function": {"name": "look", "arguments": {"x": "7"}}}]
_LOOK = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _LOOK}]
_REPLY = {"role": "assistant", "content": "Hello!"}
_RESULT = {"role": "tool", "tool_call_id": "c", "name": "look", "content": "42"}

FLOWS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "plain": ([USER, _REPLY, {**USER, "content": "more"}], 1),
    "second": ([USER, _REPLY, {**USER, "content": "more"}, _REPLY, USER], 3),
    "tool": ([USER, {**_REPLY, "tool_calls": _CALLS}, _RESULT], 1),
    "tools": ([USER, {**_REPLY, "tool_calls": _CALLS}, _RESULT, _RESULT, USER], 1),
}
"""Messages, and which of them is the reply."""

CHATML = {
    "plain": "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    "second": "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "tool": "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    "tools": "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n"
    "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n",
}
LLAMA = {
    "plain": "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "tool": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
THINKING = {name: text + "<think>\n" for name, text in CHATML.items()}
EXPECTED: dict[str, dict[str, str | None]] = {
    "qwen2_5": {**CHATML},
    "qwen3": {**CHATML},  # it leaves reasoning out of earlier turns
    "qwen3_5_think": {**THINKING},
    "llama3_1": {**LLAMA},
    "glm4moe": {"plain": "<|user|>\nmore<|assistant|>"},
    "gptoss": {"plain": "<|end|><|start|>user<|message|>more<|end|><|start|>assistant"},
    "gemma3": {
        "plain": "<end_of_turn>\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n"
    },
    # the result of a tool stands within the turn of its call
    "gemma4": {"tool": None, "tools": None},
}


@pytest.mark.parametrize(
    ("template", "flow"), [(name, flow) for name, flows in EXPECTED.items() for flow in flows]
)
def test_the_end_of_a_prompt_follows_a_reply(template, flow):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    file = _FOLDER / f"{template}.jinja"
    if not file.exists():
        pytest.skip(f"this version of TRL has no {file.name}")
    compiled = transformers._compile_jinja_template(file.read_text())
    numbers: dict[str, int] = {}

    def rendered(messages: list[dict[str, Any]]) -> list[int]:
        text = compiled.render(messages=messages, tools=_TOOLS, add_generation_prompt=True)
        return [numbers.setdefault(each, len(numbers)) for each in _TOKEN.split(text) if each]

    messages, at = FLOWS[flow]
    before, after = messages[:at], messages[at + 1 :]
    whole = rendered(messages)
    one, other = (
        rendered([*before, {"role": "assistant", "content": each}, *after]) for each in "01"
    )
    changed = [{**each, "content": _changed(each["content"])} for each in after]
    given = (whole, one, other, rendered([*before, messages[at], *changed]))
    found = following(*given, last=-1)
    expected = EXPECTED[template][flow]
    if expected is None or found is None:
        assert found is expected
        return
    names = {number: name for name, number in numbers.items()}
    assert "".join(names[each] for each in found) == expected
    assert following(*given, last=found[0]) == found[1:]  # the end of the turn was sampled


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1}, {"top_k": 1, "temperature": 0.5}]
)
@pytest.mark.parametrize("protocol", ["chat", "text"])
def test_greedy_turns_are_refused(protocol, greedy):
    body = {"model": "m", **({"prompt": "1"} if protocol == "text" else {"messages": [USER]})}
    for usable in ({"temperature": 0.1}, {"top_k": 2}, {"top_k": 0}, {"top_k": -1}, {"min_p": 0.9}):
        ask_of(protocol, json.dumps(body | usable).encode())
    with pytest.raises(Refused):
        ask_of(protocol, json.dumps(body | greedy).encode())
