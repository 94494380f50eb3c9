"""`BackendServer` with a chat template and parsers: what vLLM's render and derender calls do.

Its 16 tokens are ten digits, four roles, the end of a turn and the begin of a tool call. A message
is its role, the digits of its text, and its calls; other letters become digits. In what is sampled,
the token of a tool's role ends the reasoning.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from tests.weight_backend import BackendServer

ROLES = {"system": 10, "developer": 10, "user": 11, "assistant": 12, "tool": 13}
END, CALL, THOUGHT = 14, 15, 13
MODEL = "tiny"

_stop: ContextVar[list[str]] = ContextVar("_stop")


def digits(text: str) -> list[int]:
    return [int(each) if each in "0123456789" else ord(each) % 10 for each in text]


def text_of(tokens: list[int]) -> str:
    return "".join(str(each) if each < 10 else f"<{each}>" for each in tokens)


def rendered(body: dict[str, Any]) -> list[int]:
    tokens = []
    for tool in body.get("tools") or ():
        tokens += [ROLES["system"], *digits(tool["function"]["name"]), END]
    for message in body["messages"]:
        tokens += [ROLES[message["role"]], *digits(message.get("content") or "")]
        for call in message.get("tool_calls") or ():
            tokens += [CALL, *digits(str(json.loads(call["function"]["arguments"]).get("x", "")))]
        tokens.append(END)
    return [*tokens, ROLES["assistant"]]


def assert_tool(tool: dict[str, Any]) -> None:
    """Raise an error for a tool that vLLM does not take."""
    if "function" in tool:
        tool = {"input_schema": {}, **tool["function"]}
    if not isinstance(tool["name"], str) or not isinstance(tool["input_schema"], dict):
        raise TypeError(f"no tool: {tool}")


def joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(each["text"] for each in content)


def converted(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request of Anthropic's form in OpenAI's."""
    messages = [{"role": "system", "content": joined(body["system"])}] if "system" in body else []
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = "".join(each["text"] for each in blocks if each["type"] == "text")
        calls = [
            {"function": {"arguments": json.dumps(each["input"])}}
            for each in blocks
            if each["type"] == "tool_use"
        ]
        for each in blocks:
            if each["type"] == "tool_result":
                messages.append({"role": "tool", "content": joined(each["content"])})
        if texts or calls or message["role"] == "assistant":
            messages.append({"role": message["role"], "content": texts, "tool_calls": calls})
    tools = [{"function": {"name": each["name"]}} for each in body.get("tools", ())]
    return {"messages": messages, "tools": tools}


def parsed(tokens: list[int], number: int) -> dict[str, Any]:
    """Return the message of sampled tokens; calls have ids with this number."""
    shown = tokens[:-1] if tokens[-1] == END else tokens
    reasoning = None
    if THOUGHT in shown:
        at = shown.index(THOUGHT)
        reasoning, shown = text_of(shown[:at]), shown[at + 1 :]
    parts: list[list[int]] = [[]]
    for token in shown:
        parts.append([]) if token == CALL else parts[-1].append(token)
    calls = [
        {
            "id": f"call-{number}-{at}",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"x": text_of(part)})},
        }
        for at, part in enumerate(parts[1:])
    ]
    content = text_of(parts[0])
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls}


@dataclass
class Sample:
    """What the server has sampled for one request."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    labels: list[str]


class _Ends:
    """Ends a completion at a stop token, or when its text has a stop word."""

    def __init__(self, tokens: list[int], words: list[str]) -> None:
        self._tokens, self._words, self._found = tokens, words, [0]

    def __contains__(self, token: object) -> bool:
        self._found.append(int(str(token)))
        text = text_of(self._found[1:])
        return token == END or token in self._tokens or any(each in text for each in self._words)


class ChatBackend(BackendServer):
    """The server; `samples` is the record of all that it has sampled.

    Attributes:
        refuses: Text of a message with which requests to render are refused, "": none.
        scales: Whether it has the calls.
        fails: Status that answers the next request to a path.
        always_fails: Status that answers each request to a path.
    """

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url)
        self.samples: list[Sample] = []
        self.refuses = ""
        self.scales = True
        self.fails: dict[str, int] = {}
        self.always_fails: dict[str, int] = {}
        self.most = 8192
        self._replies = 0

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        added = {
            "/v1/models": self._models,
            "/v1/chat/completions/render": self._render,
            "/v1/messages/render": self._render,
            "/v1/chat/completions/derender": self._derender,
            "/v1/completions/derender": self._derender_text,
            "/tokenize": self._tokenize,
        }
        if not self.scales and "render" in request.path:
            added = {}
        counted: Any = super()._count
        try:
            if status := self.fails.pop(request.path, self.always_fails.get(request.path)):
                return web.json_response({"error": {"message": "it fails"}}, status=status)
            return await counted(request, added.get(request.path, handler))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return web.json_response({"error": {"message": repr(error)}}, status=400)

    async def _sampled(self, *given: Any) -> tuple[list[int], list[float], str]:
        prompt, most, temperature, ends, labels, *rest = given
        words = _stop.get([])
        done = await super()._sampled(
            prompt,
            most,
            temperature,
            _Ends(ends, words),
            labels,
            *rest,  # type: ignore[arg-type]
        )
        self.samples.append(Sample(prompt, done[0], done[1], labels[: len(done[0])]))
        return done

    async def _tokens_of(self, request: web.Request) -> web.Response:
        _stop.set((await request.json())["sampling_params"].get("stop", []))
        return await super()._tokens_of(request)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": self.most}]})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        for tool in body.get("tools", ()):
            assert_tool(tool)
        if request.path == "/v1/messages/render":
            body = converted(body)
        contents = [each.get("content") for each in body["messages"]]
        if self.refuses and self.refuses in contents:
            return web.json_response({"error": {"message": "the template says no"}}, status=400)
        return web.json_response({"token_ids": rendered(body), "sampling_params": {}})

    async def _derender(self, request: web.Request) -> web.Response:
        body = await request.json()
        [choice] = body["generate_response"]["choices"]
        assert body["generate_response"]["prompt_token_ids"]
        assert body["chat_request"]["messages"]
        self._replies += 1
        found = {**choice, "message": parsed(choice["token_ids"], self._replies)}
        return web.json_response({"choices": [found]})

    async def _derender_text(self, request: web.Request) -> web.Response:
        [response] = (await request.json())["generate_responses"]
        [choice] = response["choices"]
        tokens = choice["token_ids"]
        text = text_of(tokens[:-1] if tokens[-1] == END else tokens)
        return web.json_response({"choices": [{**choice, "text": text}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        begin = [ROLES["system"]] * body["add_special_tokens"]
        return web.json_response({"tokens": [*begin, *digits(body["prompt"])]})


class Record:
    """What the server has sampled, by its tokens from the prompt on."""

    def __init__(self, server: ChatBackend) -> None:
        self.samples = list(server.samples)

    def check(self, items: list[Any]) -> int:
        """Check the samples of a session against the record; return the number of turns found.

        Each run of trained tokens must be what the server sampled after exactly the tokens before.
        """
        found = 0
        for item in items:
            tokens, actions = item.sequences.tolist(), len(item.action_mask)
            mask = [False] * (len(tokens) - actions) + item.action_mask.tolist()
            log_probs = [0.0] * (len(tokens) - actions) + item.action_log_probs.tolist()
            versions = [-1] * (len(tokens) - actions) + item.token_versions.tolist()
            for sample in self.samples:
                begin, end = len(sample.prompt), len(sample.prompt) + len(sample.tokens)
                whole = [*sample.prompt, *sample.tokens]
                if tokens[:end] != whole or not all(mask[begin:end]):
                    continue
                found += 1
                assert log_probs[begin:end] == pytest.approx(sample.log_probs, abs=1e-6)
                labels = [int(each.split("-")[1]) for each in sample.labels]
                assert versions[begin:end] == labels
                mask[begin:end] = [False] * (end - begin)
            assert not any(mask)
        return found
