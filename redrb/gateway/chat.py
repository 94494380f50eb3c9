"""The model's chat as a vLLM server renders it: tokens of a request, and the reply of tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, Self

from redrb.errors import ConfigError, EngineError
from redrb.gateway.messages import Ask, Json, Refused
from redrb.train.engines import Generation, VLLMEngine
from redrb.train.engines.http import JsonClient

_RENDER = "/v1/chat/completions/render"


class ChatServer:
    """A vLLM server with `--enable-scale-out`, which knows the chat template and the parsers.

    Attributes:
        engine: Samples.
        model: The model's name at the server.
    """

    def __init__(self, http: JsonClient, engine: VLLMEngine, model: str, most: int) -> None:
        self.engine, self.model = engine, model
        self._http, self._most = http, most

    @classmethod
    async def open(cls, url: str, model: str | None = None, *, api_key: str | None = None) -> Self:
        """Connect to a server.

        Raises:
            ConfigError: It cannot do what the gateway needs, or has no such model.
            EngineError: It does not answer.
        """
        http = JsonClient(url, timeout=600.0, api_key=api_key)
        try:
            found = {str(each["id"]): each for each in (await http.request("/v1/models"))["data"]}
            name = model or next(iter(found))
            most = int(found[name]["max_model_len"])
            hello = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
            await http.request(_RENDER, hello)
        except (KeyError, TypeError, ValueError, StopIteration, EngineError) as error:
            await http.close()
            if isinstance(error, EngineError) and error.is_outage:
                raise
            raise ConfigError(
                f"{http.where}: the gateway needs vLLM 0.32 or newer with --enable-scale-out"
                + (f", which serves {model!r}" if model else "")
                + f"; SGLang cannot do this. The server says: {error}"
            ) from error
        return cls(http, VLLMEngine(url, model=name, api_key=api_key), name, most)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self.engine.close()

    async def prompt(self, ask: Ask, text: str | None = None) -> list[int]:
        """Return the tokens of a request, as the server itself would sample from them.

        Args:
            text: The end of a prompt, whose tokens are returned instead.
        """
        if ask.protocol != "text":
            return await self._rendered(ask, ask.messages)
        body = {"model": self.model, "prompt": ask.text if text is None else text}
        reply = await self._http.request("/tokenize", {**body, "add_special_tokens": text is None})
        return self._tokens(reply.get("tokens"))

    async def continuation(
        self, ask: Ask, at: int, last: int
    ) -> tuple[list[int], list[int] | None]:
        """Return the tokens of a request, and those of them that follow a reply.

        They are what two prompts have in common at their end whose replies differ. So nothing before
        them matters, such as reasoning that the template leaves out.

        Args:
            at: The reply's place in the messages.
            last: Its last sampled token, which may be the end of its turn already.

        Returns:
            The second are None if the template shows them in another way after this reply.
        """
        whole, (before, after) = await self.prompt(ask), (ask.messages[:at], ask.messages[at + 1 :])
        changed = [{**each, "content": _other_than(each["content"])} for each in after]
        variants = [
            [*before, {"role": "assistant", "content": "0"}, *after],
            [*before, {"role": "assistant", "content": "1"}, *after],
            [*before, ask.messages[at], *changed],
        ]
        try:
            found = await asyncio.gather(*(self._rendered(ask, each) for each in variants))
        except EngineError as error:
            if not error.is_refusal:
                raise
            return whole, None  # such as a template that asks for the calls of a tool's result
        return whole, following(whole, *found, last=last)

    async def sample(self, ask: Ask, tokens: list[int]) -> Generation:
        """Sample the reply to a request, whose tokens with all before them these are."""
        room = self._most - len(tokens)
        if room < 1:
            raise Refused(
                f"context_length_exceeded: the history has {len(tokens)} tokens, and the model's "
                f"context {self._most}."
            )
        stop: Json = {"stop": ask.stop} if ask.stop else {}
        done = await self.engine.generate(
            tokens, max_new_tokens=min(ask.most or room, room), **ask.sampling, **stop
        )
        if done.finish == "abort":
            raise Refused("this gateway ends: send the request again.", 503)
        return done

    async def reply(self, ask: Ask, tokens: list[int], done: Generation) -> Json:
        """Return the reply that sampled tokens are.

        Returns:
            `message` in OpenAI's form, `finish`, `stop`: the stop word that ended it or None,
            `usage`, and `logprobs` if the request asks for them. The message of a text has its text
            as `content`, and `ended` says whether a token ended it that is not in it.
        """
        choice: Json = {"index": 0, "token_ids": done.tokens, "finish_reason": done.finish}
        if ask.log_probs:
            pairs = zip(done.tokens, done.log_probs, strict=True)
            content = [{"token_id": token, "logprob": value} for token, value in pairs]
            choice["logprobs"] = {"content": content}
        response = {"choices": [choice], "prompt_token_ids": tokens}
        body: Json = {"model": self.model}
        if ask.protocol == "text":
            body |= {"generate_responses": [response], "prompt_token_ids": [tokens]}
        else:
            request = {"model": self.model, "messages": ask.messages, **ask.template}
            body |= {"generate_response": response, "prompt_token_ids": tokens}
            body["chat_request"] = request
        path = "completions" if ask.protocol == "text" else "chat/completions"
        found = await self._http.request(f"/v1/{path}/derender", body)
        try:
            [choice] = found["choices"]
            message = _message(choice)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._http.where} answered without a reply of these tokens: {error!r:.200}",
                where=self._http.where,
                status=200,
            ) from error
        ends = [(message["content"].find(word), word) for word in ask.stop]
        cut, word = min((each for each in ends if each[0] >= 0), default=(None, None))
        is_ended = done.finish == "stop" and word is None
        whole, message["content"] = message["content"], message["content"][:cut]
        return {
            "id": secrets.token_hex(12),
            "created": int(time.time()),
            "message": message,
            "whole": whole + "\0" * is_ended,
            "finish": "tool_calls" if message.get("tool_calls") else done.finish,
            "stop": word,
            "usage": [len(tokens), len(done.tokens)],
            "logprobs": choice.get("logprobs"),
        }

    async def _rendered(self, ask: Ask, messages: list[Json]) -> list[int]:
        body = {"model": self.model, "messages": messages, **ask.template}
        return self._tokens((await self._http.request(_RENDER, body)).get("token_ids"))

    def _tokens(self, found: Any) -> list[int]:
        if not isinstance(found, list) or not all(type(each) is int for each in found):
            where = self._http.where
            raise EngineError(f"{where} answered without token ids.", where=where, status=200)
        return found


def following(
    whole: list[int], one: list[int], other: list[int], changed: list[int], *, last: int
) -> list[int] | None:
    """Return what follows a reply in a prompt; None: the prompt does not show it.

    Args:
        one, other: The prompt with two other replies.
        changed: The prompt with other messages after the reply.
        last: The reply's last sampled token: if it is the end of its turn, it is not repeated.
    """
    count = _common(reversed(one), reversed(other))
    tail, shown = one[len(one) - count :], whole[len(whole) - count :]
    is_all = (
        _common(whole, changed) >= len(whole) - count
    )  # else some stands within the reply's turn
    if not tail or len(tail) == len(one) or shown[1:] != tail[1:] or not is_all:
        return None
    # turns may end with a token of their own, such as those with calls
    return shown[1:] if last in (tail[0], shown[0]) else shown


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """Return how many tokens at the begin are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _other_than(content: str) -> str:
    return ("1" if content.startswith("0") else "0") + content


def _message(choice: Json) -> Json:
    """Return the message of a choice, without fields that are empty."""
    if "text" in choice:
        return {"role": "assistant", "content": str(choice["text"])}
    found = choice["message"]
    message: Json = {"role": "assistant", "content": str(found.get("content") or "")}
    if found.get("reasoning"):
        message["reasoning"] = str(found["reasoning"])
    calls = [
        {
            "id": str(call["id"]),
            "type": "function",
            "function": {name: str(call["function"][name]) for name in ("name", "arguments")},
        }
        for call in found.get("tool_calls") or ()
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def stored(reply: Json) -> bytes:
    """Return a reply as a session keeps it."""
    return json.dumps(reply).encode()
