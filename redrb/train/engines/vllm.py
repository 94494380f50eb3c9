"""`VLLMEngine`: an OpenAI-style server of vLLM, 0.16 or newer.

Sampling needs `vllm serve MODEL`; weight updates need vLLM 0.32 and VLLM_SERVER_DEV_MODE=1. vLLM's
log-probabilities are those before the temperature, unless it is started with
`--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from redrb.errors import (
    ConfigError,
    DecodeError,
    EngineError,
    StoreUnavailable,
    WeightCorrupt,
    WeightsTorn,
)
from redrb.train.engines.completions import Sampled
from redrb.train.engines.engine import (
    Engine,
    Published,
    WeightsKeptError,
    WeightsMixedError,
    WeightsReplacedError,
    WeightsUnreachableError,
)
from redrb.train.engines.routing import Routing, decoded

Pause: TypeAlias = Literal["keep", "wait", "abort"]
"""What becomes of requests in flight when weights change."""

BACKEND = "redrb "
"""Begins the messages of errors of redrb's backend in vLLM; the class of the error follows."""

_OF_BACKEND = re.compile(
    rf"({BACKEND}[A-Z]\w*: .*?)(', please check the stack trace above.*)?\Z", re.DOTALL
)
"""Such an error, and how vLLM ends its own message around that of a worker process."""

PASSED = "this server has a later version"
"""In the message of an error of that backend."""

NO_URL = "the server has no REDRB_URL"
"""In the message of an error of that backend."""

NOT_TOLD = "call init_weight_transfer_engine first"
"""In the message of an error of that backend: the server was started again since it was told."""

_log = logging.getLogger("redrb")


class VLLMEngine(Engine):
    """Samples by `/inference/v1/generate`, which tells the weights of each token.

    The server has it with `--enable-scale-out`. Without it, `/v1/completions` samples, and `pause`
    is "abort": nothing else tells where in a completion the weights have changed.
    """

    def __init__(self, url: str, *, model: str, pause: Pause = "keep", **options: Any) -> None:
        """Make an engine; `model` is the model's name at the server.

        Args:
            model: The model's name at the server.
            pause: What becomes of requests in flight when weights change. "keep": they stay, and
                go on with the new weights, whose prefix is computed again; nothing that was sampled
                is sent twice. "wait": they end first. "abort": they return what they have, and are
                sent again.
            options: Options of `Engine`: `timeout`, `retry_s` and `api_key`.

        Raises:
            ConfigError: An argument is not usable.
        """
        super().__init__(url, **options)
        if pause not in get_args(Pause):
            raise ConfigError(f"pause={pause!r:.40}: give {', '.join(map(repr, get_args(Pause)))}.")
        self._model, self._pause_mode = model, pause
        self._tells_weights, self._needs_url = True, False

    @property
    def keeps_requests(self) -> bool:
        """Whether requests in flight stay at the server while weights change."""
        return self._tells_weights and self._pause_mode != "abort"

    async def receives(self, where: Mapping[str, Any], url: str) -> bool:
        """Return whether the server has redrb's backend; if so, tell it where the weights are.

        The URL, which may hold a password, is sent only to a server that has none of its own.
        """
        told = {**where, "url": url} if self._needs_url else where
        try:
            await self._repeated(lambda: self._init(told), self._retry_s)
        except EngineError as error:
            if NO_URL in str(error) and not self._needs_url:
                self._needs_url = True
                return await self.receives(where, url)
            if BACKEND in str(error):
                raise
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.OK):
                return False  # another backend, none, or a server that takes no updates
            raise
        return True

    async def _init(self, where: Mapping[str, Any]) -> None:
        await self._asked("/init_weight_transfer_engine", {"init_info": dict(where)})

    async def _request(
        self, tokens: list[int], most: int, *, routed_tokens: int, **sampling: Any
    ) -> Sampled:
        if routed_tokens:
            sampling["routed_experts_prompt_start"] = routed_tokens
        if self._tells_weights:
            try:
                return await self._generated(tokens, {"max_tokens": most, **sampling})
            except EngineError as error:
                if error.status not in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
                    raise
            self._tells_weights = False
            _log.info(
                "%s does not tell the weights of each token: start it with --enable-scale-out",
                self._client.where,
            )
        return await self._completed(tokens, {"max_tokens": most, **sampling})

    async def _generated(self, tokens: list[int], sampling: Mapping[str, Any]) -> Sampled:
        body = {
            "model": self._model,
            "token_ids": tokens,
            "sampling_params": {"logprobs": 0, **sampling},
        }
        reply = await self._client.request("/inference/v1/generate", body)
        try:
            [choice] = reply["choices"]
            found = list(choice["token_ids"])
            log_probs = [each["logprob"] for each in choice["logprobs"]["content"]]
            labels = [""] * len(found)  # of tokens whose weights it does not tell
            for span in choice["weight_versions"] or ():
                for at in range(max(0, span["start"]), min(span["end"], len(found))):
                    labels[at] = str(span["version"])
            routed = self._routed(choice, len(tokens) + len(found) - 1)
            finish = choice["finish_reason"]
            return Sampled(found, log_probs, finish, labels, routed_experts=routed)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error

    async def _completed(self, tokens: list[int], sampling: Mapping[str, Any]) -> Sampled:
        body = {
            "model": self._model,
            "prompt": tokens,
            "logprobs": 1,
            "return_token_ids": True,
            **sampling,
        }
        reply = await self._client.request("/v1/completions", body)
        try:
            [choice] = reply["choices"]
            found = list(choice["token_ids"])
            log_probs, finish = list(choice["logprobs"]["token_logprobs"]), choice["finish_reason"]
            routed = self._routed(choice, len(tokens) + len(found) - 1)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error
        label = None if self._label is None else await self._weights_label()
        return Sampled(found, log_probs, finish, label=label, routed_experts=routed)

    def _routed(self, choice: Mapping[str, Any], most: int) -> Routing | None:
        try:
            return decoded(choice.get("routed_experts"), most)
        except ValueError as error:
            raise self._malformed("routed experts as vLLM 0.32 sends them") from error

    async def _weights_label(self) -> str:
        return str((await self._client.request("/weight_info")).get("weight_version"))

    async def _pause(self, *, abort: bool) -> None:
        mode = self._pause_mode if self.keeps_requests and not abort else "abort"
        await self._client.request(f"/pause?mode={mode}", {})

    async def _load(self, source: Path | Published) -> None:
        try:
            if isinstance(source, Path):
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
                await self._asked("/collective_rpc", body)
            else:
                await self._receive(source)
        except EngineError as error:
            if error.is_outage:
                raise
            reason = str(error).removeprefix(f"{error.where}: ")
            text = f"{self._client.where} could not load weights: {reason}"
            is_passed = any(each in text for each in (PASSED, NOT_TOLD))
            if isinstance(source, Published) and (BACKEND not in text or is_passed):
                raise WeightsReplacedError(text, where=error.where, status=error.status) from error
            if BACKEND not in text or f"{BACKEND}{WeightsTorn.__name__}" in text:
                raise WeightsMixedError(text, where=error.where, status=error.status) from error
            is_unreachable = f"{BACKEND}{StoreUnavailable.__name__}" in text
            kind = WeightsUnreachableError if is_unreachable else WeightsKeptError
            kept = kind(text, where=error.where, status=error.status)
            damage = (WeightCorrupt.__name__, DecodeError.__name__)
            kept.is_damage = any(f"{BACKEND}{name}" in text for name in damage)
            raise kept from error

    async def _receive(self, source: Published) -> None:
        """Load a version by the four calls that begin, make and end an update.

        Other makers may do the same at the same time: an update that they have begun is ended, and
        one that they have ended is begun again. Only the second call changes weights.
        """
        wanted = {"version": source.version, "created_s": source.created_s}
        for last in (False, True):
            try:
                await self._asked("/start_weight_update", {})
                await self._asked("/update_weights", {"update_info": wanted})
                break
            except EngineError as error:
                if last or error.is_outage or BACKEND in str(error):
                    raise
            with suppress(EngineError):  # there may be none any more
                await self._asked("/finish_weight_update", {})
        with suppress(EngineError):
            await self._asked("/finish_weight_update", {})
        if not (await self._client.request("/is_paused")).get("is_paused"):
            await self._pause(abort=False)  # others have resumed it: what it computed is dropped

    async def _asked(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a control call; an error of the server itself is no outage.

        An error of redrb's backend has its message alone, without that of vLLM around it.
        """
        try:
            await self._client.request(path, body)
        except EngineError as error:
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            text = str(error)
            if (found := _OF_BACKEND.search(text)) is not None:
                text = f"{error.where}: {found[1]}"
            raise EngineError(text, where=error.where, status=HTTPStatus.OK) from error

    async def _resume(self) -> None:
        await self._client.request("/resume", {})
