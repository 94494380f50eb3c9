"""The chat of a vLLM server: the tokens of a request, and the reply that sampled tokens are."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from typing import Any, Self

from redrb.errors import ConfigError, EngineError
from redrb.gateway.messages import Ask, Json, Refused
from redrb.train.engines import Generation, VLLMEngine
from redrb.train.engines.http import JsonClient

_PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}

_REFUSALS = (KeyError, TypeError, ValueError, StopIteration, EngineError)

_TIMEOUT_S = 600.0

_log = logging.getLogger("redrb")

MOST_AT_ONCE = 16
"""Most calls at a time that render or parse."""


class ChatServer:
    """A vLLM server with `--enable-scale-out`: it has the chat template and the parsers.

    Attributes:
        engine: Samples.
        model: The model's name at the server.
        sampling: How the trainer takes all turns to be sampled; other values are refused.
        max_tokens: Most tokens of a turn, whatever its request says; None: as many as fit.
    """

    def __init__(self, http: JsonClient, engine: VLLMEngine, model: str, most: int) -> None:
        self.engine, self.model = engine, model
        self.sampling: Json = {}
        self.max_tokens: int | None = None
        self._http, self._most = http, most

    @classmethod
    async def open(cls, url: str, model: str | None = None) -> Self:
        """Connect to a server.

        Raises:
            ConfigError: It cannot do what the gateway needs, or has no such model.
            EngineError: It does not answer.
        """
        http = JsonClient(url, timeout=_TIMEOUT_S, most=MOST_AT_ONCE)
        try:
            found = {str(each["id"]): each for each in (await http.request("/v1/models"))["data"]}
            name = model or next(iter(found))
            most = int(found[name]["max_model_len"])
            hello = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
            await http.request(f"{_PATHS['chat']}/render", hello)
            return cls(http, VLLMEngine(url, model=name), name, most)
        except BaseException as error:  # also if it is cancelled
            await http.close()
            if not isinstance(error, _REFUSALS) or getattr(error, "is_outage", False):
                raise
            raise ConfigError(
                f"{http.where}: the gateway needs vLLM 0.32 or newer with --enable-scale-out, "
                f"which serves {model or 'a model'!r}; SGLang has no such calls. It says: {error}"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self.engine.close()

    async def prompt(self, ask: Ask, messages: list[Json] | None = None) -> list[int]:
        """Return the tokens of a request, or of the same one with other messages."""
        if ask.prompt:
            return await self.text(ask.prompt, is_begin=True)
        shown = {**ask.sampling, **ask.template, "messages": messages or ask.messages}
        body = {"model": self.model, "max_tokens": 1, **shown}
        reply = await self._asked(f"{_PATHS[ask.protocol]}/render", body)
        return self._tokens(reply.get("token_ids"))

    async def text(self, text: str, *, is_begin: bool = False) -> list[int]:
        """Return the tokens of a text, with those that begin a prompt if it is one's begin."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": is_begin}
        return self._tokens((await self._asked("/tokenize", body)).get("tokens"))

    async def continuation(self, ask: Ask, at: int, last: int) -> list[int] | None:
        """Return the tokens of a request that follow a reply.

        They are what two prompts have in common at their end whose replies differ. So nothing
        before them matters, such as reasoning that the template leaves out.

        Args:
            at: The reply's place in the messages.
            last: Its last sampled token, which may be the end of its turn already.

        Returns:
            None if the template shows them in another way after this reply.
        """
        before, after = ask.messages[:at], ask.messages[at + 1 :]
        others = [[*before, {"role": "assistant", "content": each}, *after] for each in "01"]
        changed = [{**each, "content": _changed(each.get("content"))} for each in after]
        others.append([*before, ask.messages[at], *changed])
        whole = await self.prompt(ask)
        try:
            found = await asyncio.gather(*(self.prompt(ask, each) for each in others))
        except EngineError as error:
            if not error.is_refusal:
                raise
            return None  # such as a template that asks for the calls of a tool's result
        return following(whole, *found, last=last)

    async def sample(self, ask: Ask, tokens: list[int]) -> Generation:
        """Sample the reply to a request; the tokens are those of all that is before it."""
        room = self._most - len(tokens)
        if room < 1:
            raise Refused(f"context_length_exceeded: {len(tokens)} tokens, at most {self._most}.")
        for name, value in self.sampling.items():
            if ask.sampling.get(name, value) != value:
                raise Refused(f"{name} must be {value}, as the trainer has it: leave it out.")
        sampling = self.sampling | ask.sampling | ({"stop": ask.stop} if ask.stop else {})
        most = min(each for each in (ask.max_tokens, self.max_tokens, room) if each)
        return await self.engine.generate(tokens, max_new_tokens=most, **sampling)

    async def reply(self, ask: Ask, tokens: list[int], done: Generation) -> tuple[Json, str]:
        """Return the reply that sampled tokens are; if no parser takes them, it is their text.

        Returns:
            `message` in OpenAI's form, also of a text; `finish`; `stop`, the word that ended it, or
            None; and `usage`. Then the content with that word, and a NUL if a token ended it.
        """
        choice = {"index": 0, "token_ids": done.tokens, "finish_reason": done.finish}
        response = {"choices": [choice], "prompt_token_ids": tokens}
        try:
            [found] = (await self._derendered(ask, response))["choices"]
            told = found.get("message") or {"content": found["text"]}
            content = str(told["content"] or "")
        except (KeyError, TypeError, ValueError) as error:
            raise self._malformed("a reply") from error
        ends = sorted((content.find(word), word) for word in ask.stop if word in content)
        cut, word = ends[0] if ends else (None, None)
        message = {"role": "assistant", "content": content[:cut]}
        message |= {name: told[name] for name in ("reasoning", "tool_calls") if told.get(name)}
        calls = done.finish == "stop" and "tool_calls" in message
        return {
            "id": secrets.token_hex(12),
            "created": int(time.time()),
            "message": message,
            "finish": "tool_calls" if calls else done.finish,
            "stop": word,
            "usage": [len(tokens), len(done.tokens)],
        }, content + "\0" * (done.finish == "stop" and word is None)

    async def _derendered(self, ask: Ask, response: Json) -> Json:
        """Return the parsed reply to a chat, or the text of one that no parser takes."""
        if not ask.prompt:
            request = {**_template(ask), "messages": [{"role": "user", "content": ""}]}
            chat = {"model": self.model, "generate_response": response, "chat_request": request}
            found = await self.engine.repeated(partial(self._parsed, chat))
            if found is not None:
                return found
        body = {"model": self.model, "generate_responses": [response]}
        return await self._asked("/v1/completions/derender", body)

    async def _parsed(self, chat: Json) -> Json | None:
        """Return the parsed reply to a chat; None: the server's parser does not take it."""
        try:
            return await self._http.request(f"{_PATHS['chat']}/derender", chat, last=True)
        except EngineError as error:
            if not (error.is_refusal or error.status == HTTPStatus.INTERNAL_SERVER_ERROR):
                raise
            _log.warning("a reply that cannot be parsed is given as its text: %s", error)
            return None

    async def _asked(self, path: str, body: Json) -> Json:
        return await self.engine.repeated(partial(self._http.request, path, body))

    def _tokens(self, found: Any) -> list[int]:
        if not isinstance(found, list) or not {*map(type, found)} <= {int}:
            raise self._malformed("token ids")
        return found

    def _malformed(self, what: str) -> EngineError:
        where = self._http.where
        return EngineError(f"{where} answered without {what}.", where=where, status=200)


def following(
    whole: list[int], one: list[int], other: list[int], changed: list[int], *, last: int
) -> list[int] | None:
    """Return what follows a reply in a prompt; None: the prompt does not show it.

    Args:
        one, other: The prompt with two other replies.
        changed: The prompt with other messages after the reply.
        last: The reply's last sampled token: if it is the end of its turn, it is not repeated.
    """
    pairs = zip(reversed(one), reversed(other), strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    at = max(0, len(whole) - count)
    tail, shown = one[len(one) - count :], whole[at:]
    is_all = whole[:at] == changed[:at]  # else some stands before the end
    if not tail or len(tail) == len(one) or shown[1:] != tail[1:] or not is_all:
        return None
    # turns may end with a token of their own, such as those with calls
    return shown[1:] if last in (tail[0], shown[0]) else shown


def _changed(content: Any) -> Any:
    """Return a content with other texts in the same blocks."""
    if isinstance(content, list):
        return [
            {**each, **{name: _changed(each[name]) for name in {"text", "content"} & each.keys()}}
            for each in content
        ]
    return ("1" if str(content).startswith("0") else "0") + str(content or "")


def _template(ask: Ask) -> Json:
    """Return what parsers of replies ask of a request, in the form of OpenAI."""
    if ask.protocol == "chat":
        return ask.template
    tools = [
        {"type": "function", "function": {"name": each["name"], "parameters": each["input_schema"]}}
        for each in ask.template.get("tools", ())
    ]
    is_off = ask.template.get("thinking") == {"type": "disabled"}
    effort = {"reasoning_effort": "none"} if is_off else {}
    return effort | ({"tools": tools} if tools else {})
