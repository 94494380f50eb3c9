"""Bodies, events and errors of the three protocols, made of a turn's reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from redrb.gateway.messages import Ask, Json, Protocol, Refused, value_of

PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": "chat",
    "completions": "text",
    "messages": "messages",
}
"""The protocol of each path below `/v1/`."""

PART_BYTES = 2**14
"""Bytes of a reply that are given to a connection at once; it holds at most 2^16 before these."""

READ_S = 60.0
"""Seconds in which a client must have read a reply, but for what the connection holds."""

ALL_UNREAD = 256 * 2**20
"""Most bytes of all replies that are being sent."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_KINDS |= {409: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"}


@dataclass(slots=True)
class Reply:
    """A turn's reply for the agent that asked.

    Attributes:
        stored: As `ChatServer.reply` returns it.
        tokens: Further fields of the choice: the tokens, if the agent asks for them.
    """

    ask: Ask
    stored: Json
    tokens: Json = field(default_factory=dict)

    @property
    def message(self) -> Json:
        """The message in the form of the protocol, which the agent sends back."""
        if self.ask.protocol == "messages":
            return {"role": "assistant", "content": list(self._blocks())}
        message: Json = self.stored["message"]
        return message

    def body(self) -> Json:
        """Return the whole body."""
        if self.ask.protocol == "messages":
            return {**self._head(), **self.message, **self._end(), **self.tokens}
        shown = {"text": self.message["content"]} if self.ask.prompt else {"message": self.message}
        return {**self._head(), "choices": [self._choice(shown, self._end())], **self._usage()}

    def events(self) -> Iterator[bytes]:
        """Yield the same as server-sent events."""
        if self.ask.protocol == "messages":
            for each in self._message_events():
                yield f"event: {each['type']}\n".encode() + _event(each)
            return
        message = self.message
        parts: list[Json] = [{"text": message["content"]}, {"text": ""}]
        if not self.ask.prompt:
            deltas: list[Json] = [{"role": "assistant", "content": ""}]
            named = ("reasoning", "content")
            deltas += [{name: message[name]} for name in named if message.get(name)]
            for index, call in enumerate(message.get("tool_calls", ())):
                deltas.append({"tool_calls": [{"index": index, **call}]})
            parts = [{"delta": each} for each in [*deltas, {}]]
        for part in parts:
            end = self._end() if part is parts[-1] else {"finish_reason": None}
            yield _event({**self._head(".chunk"), "choices": [self._choice(part, end)]})
        if self.ask.stream_options.get("include_usage") is True:
            yield _event({**self._head(".chunk"), "choices": [], **self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, chunk: str = "") -> Json:
        id_, model = self.stored["id"], self.ask.model
        if self.ask.protocol == "messages":
            return {"id": f"msg_{id_}", "type": "message", "model": model, **self._usage()}
        kind = "text_completion" if self.ask.prompt else f"chat.completion{chunk}"
        created = self.stored["created"]
        return {"id": f"chatcmpl-{id_}", "object": kind, "created": created, "model": model}

    def _end(self) -> Json:
        finish, word = self.stored["finish"], self.stored["stop"]
        if self.ask.protocol != "messages":
            return {"finish_reason": finish, **self.tokens}
        reason = "stop_sequence" if word else _REASONS[finish]
        return {"stop_reason": reason, "stop_sequence": word}

    def _choice(self, shown: Json, end: Json) -> Json:
        return {"index": 0, "logprobs": None, **shown, **end}

    def _usage(self) -> Json:
        given, sampled = self.stored["usage"]
        if self.ask.protocol == "messages":
            return {"usage": {"input_tokens": given, "output_tokens": sampled}}
        counts = {"prompt_tokens": given, "completion_tokens": sampled}
        return {"usage": counts | {"total_tokens": given + sampled}}

    def _blocks(self) -> Iterator[Json]:
        message = self.stored["message"]
        if text := message.get("reasoning"):
            yield {"type": "thinking", "thinking": text, "signature": ""}
        if text := message["content"]:
            yield {"type": "text", "text": text}
        for call in message.get("tool_calls", ()):
            name, value = call["function"]["name"], value_of(call["function"]["arguments"])
            value = value if isinstance(value, dict) else {"arguments": value}
            yield {"type": "tool_use", "id": call["id"], "name": name, "input": value}

    def _message_events(self) -> Iterator[Json]:
        begin = {**self._head(), "role": "assistant", "content": [], "stop_reason": None}
        yield {"type": "message_start", "message": {**begin, "stop_sequence": None}}
        for index, block in enumerate(self._blocks()):
            name = "input" if block["type"] == "tool_use" else str(block["type"])
            whole, empty = block[name], {} if name == "input" else ""
            delta = {"type": f"{name}_delta", name: whole}
            if name == "input":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(whole)}
            place = {"index": index}
            yield {"type": "content_block_start", **place, "content_block": {**block, name: empty}}
            yield {"type": "content_block_delta", **place, "delta": delta}
            yield {"type": "content_block_stop", **place}
        yield {"type": "message_delta", "delta": self._end(), **self._usage(), **self.tokens}
        yield {"type": "message_stop"}


class Replies:
    """Replies that are being sent, of bounded size together however slowly clients read them."""

    def __init__(self) -> None:
        self.unread = 0

    def of(self, data: bytes, media_type: str) -> Response:
        """Return a reply; sending raises `Refused` if there are too many already."""
        return _Sent(self, data, media_type)


class _Sent(Response):
    def __init__(self, replies: Replies, data: bytes, media_type: str) -> None:
        super().__init__(data, media_type=media_type)
        self._replies = replies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send it in parts, each when the connection has room; not to its end if that lasts."""
        data, replies = bytes(self.body), self._replies
        if replies.unread + len(data) > ALL_UNREAD:
            raise Refused("too many replies are being read: send the request again.", 503)
        replies.unread += len(data)
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with suppress(TimeoutError):  # the server then closes the connection
                async with asyncio.timeout(READ_S):
                    await send(head)
                    for at in range(0, len(data), PART_BYTES):
                        part = {"body": data[at : at + PART_BYTES], "more_body": True}
                        await send({"type": "http.response.body", **part})
                    await send({"type": "http.response.body"})
        finally:
            replies.unread -= len(data)


def models_of(name: str) -> Json:
    """Return the list of models, as both OpenAI and Anthropic have it."""
    model = {"id": name, "object": "model", "owned_by": "redrb", "created": 0}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    page = {"object": "list", "has_more": False, "first_id": name, "last_id": name}
    return {**page, "data": [model]}


def error_of(path: str, status: int, message: str) -> Json:
    """Return the body of an error in the protocol of a path."""
    kind = _KINDS.get(status, "api_error")
    if path.endswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _event(data: Json) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
