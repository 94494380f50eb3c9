"""`VLLMEngine`: an OpenAI-style server of vLLM, 0.16 or newer.

Sampling needs `vllm serve MODEL`; weight updates need vLLM 0.32 and VLLM_SERVER_DEV_MODE=1. vLLM's
log-probabilities are those before the temperature, unless it is started with
`--logprobs-mode processed_logprobs`.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from redrb.errors import EngineError
from redrb.train.engines.engine import Engine, Sampled


class VLLMEngine(Engine):
    """Samples by `/v1/completions`; updates by `/pause`, `/collective_rpc` and `/resume`.

    `/weight_info` tells after each completion which weights the server has.
    """

    def __init__(self, url: str, *, model: str, **options: Any) -> None:
        """Make an engine; `model` is the model's name at the server.

        Args:
            options: Options of `Engine`: `timeout`, `retry_s` and `api_key`.
        """
        super().__init__(url, **options)
        self._model = model

    async def _request(self, tokens: list[int], most: int, **sampling: Any) -> Sampled:
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": most,
            "logprobs": 1,
            "return_token_ids": True,
            **sampling,
        }
        reply = await self._client.request("/v1/completions", body)
        try:
            [choice] = reply["choices"]
            log_probs = list(choice["logprobs"]["token_logprobs"])
            part = Sampled(list(choice["token_ids"]), log_probs, choice["finish_reason"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._malformed("token ids and log-probabilities") from error
        return part if self._label is None else replace(part, label=await self._weights_label())

    async def _weights_label(self) -> str:
        return str((await self._client.request("/weight_info")).get("weight_version"))

    async def _pause(self) -> None:
        await self._client.request("/pause", {})

    async def _load(self, path: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            await self._client.request("/collective_rpc", body)
        except EngineError as error:
            if error.status != HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
            # no outage: these weights cannot be loaded, later ones perhaps
            raise self._error(f"could not load {path}: {error}", 200) from error

    async def _resume(self) -> None:
        await self._client.request("/resume", {})
