"""Bodies, events and errors of the three protocols, made of a turn's reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from redrb.gateway.messages import Ask, Json, Protocol

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_KINDS |= {409: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"}


def body_of(ask: Ask, reply: Json, tokens: Json) -> Json:
    """Return the whole body; `tokens` are fields of a choice, if the request asks for them."""
    if ask.protocol == "messages":
        content = [block for block, _ in _blocks(reply)]
        return {**_opened(ask, reply), "content": content, **_ended(reply), "usage": _usage(reply)}
    message, finish = reply["message"], reply["finish"]
    choice: Json = {"index": 0, "finish_reason": finish, "logprobs": reply["logprobs"], **tokens}
    if ask.protocol == "text":
        choice["text"] = message["content"]
        kind = "text_completion"
    else:
        choice["message"] = message
        kind = "chat.completion"
    return {**_head(ask, reply, kind), "choices": [choice], "usage": _usage(reply, "prompt")}


def events_of(ask: Ask, reply: Json, tokens: Json) -> Iterator[bytes]:
    """Yield the same as server-sent events."""
    if ask.protocol == "messages":
        yield from _message_events(ask, reply)
        return
    is_text = ask.protocol == "text"
    head = _head(ask, reply, "text_completion" if is_text else "chat.completion.chunk")
    message, last = reply["message"], {"finish_reason": reply["finish"], **tokens}
    if is_text:
        parts: list[Json] = [{"text": message["content"]}, {"text": "", **last}]
    else:
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning", "content") if message.get(name)]
        for index, call in enumerate(message.get("tool_calls") or ()):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        parts = [*({"delta": each} for each in deltas), {"delta": {}, **last}]
    parts[-2]["logprobs"] = reply["logprobs"]
    for part in parts:
        yield _event({**head, "choices": [{"index": 0, "finish_reason": None, **part}]})
    if ask.usage:
        yield _event({**head, "choices": [], "usage": _usage(reply, "prompt")})
    yield b"data: [DONE]\n\n"


def error_of(protocol: Protocol | None, status: int, message: str) -> Json:
    """Return the body of an error."""
    kind = _KINDS.get(status, "api_error")
    if protocol == "messages":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _event(data: Json, name: str = "") -> bytes:
    return (f"event: {name}\n" * bool(name) + f"data: {json.dumps(data)}\n\n").encode()


def _head(ask: Ask, reply: Json, kind: str) -> Json:
    id_ = f"{'cmpl' if ask.protocol == 'text' else 'chatcmpl'}-{reply['id']}"
    return {"id": id_, "object": kind, "created": reply["created"], "model": ask.model}


def _usage(reply: Json, name: str = "") -> Json:
    given, sampled = reply["usage"]
    if not name:
        return {"input_tokens": given, "output_tokens": sampled}
    counts = {"prompt_tokens": given, "completion_tokens": sampled}
    return {**counts, "total_tokens": given + sampled}


def _opened(ask: Ask, reply: Json) -> Json:
    head = {"id": f"msg_{reply['id']}", "type": "message", "role": "assistant"}
    return {**head, "model": ask.model, "content": []}


def _ended(reply: Json) -> Json:
    reason = "stop_sequence" if reply["stop"] else _REASONS[reply["finish"]]
    return {"stop_reason": reason, "stop_sequence": reply["stop"]}


def _blocks(reply: Json) -> Iterator[tuple[Json, list[Json]]]:
    """Yield the blocks of a message of Anthropic's form, each with its deltas."""
    message = reply["message"]
    if text := message.get("reasoning"):
        block = {"type": "thinking", "thinking": text, "signature": ""}
        yield block, [{"type": "thinking_delta", "thinking": text}]
    if text := message["content"]:
        yield {"type": "text", "text": text}, [{"type": "text_delta", "text": text}]
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
        delta = {"type": "input_json_delta", "partial_json": arguments}
        yield {**block, "input": _object(arguments)}, [delta]


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}


def _message_events(ask: Ask, reply: Json) -> Iterator[bytes]:
    usage = _usage(reply)
    begun = {**_opened(ask, reply), "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event({"type": "message_start", "message": begun}, "message_start")
    empty: Json = {"thinking": "", "text": "", "input": {}}
    for index, (block, deltas) in enumerate(_blocks(reply)):
        begun = {**block, **{name: empty[name] for name in empty.keys() & block.keys()}}
        for name, more in (
            ("content_block_start", {"content_block": begun}),
            *(("content_block_delta", {"delta": each}) for each in deltas),
            ("content_block_stop", {}),
        ):
            yield _event({"type": name, "index": index, **more}, name)
    ended = {"type": "message_delta", "delta": _ended(reply), "usage": usage}
    yield _event(ended, "message_delta")
    yield _event({"type": "message_stop"}, "message_stop")
