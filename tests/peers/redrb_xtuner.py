"""A plugin of pytest: XTuner's configurations of a replay buffer build redrb's."""

from __future__ import annotations

import os
import tempfile
import uuid
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config
from xtuner.v1.data_proto.rl_data import RolloutState
from xtuner.v1.rl import replay_buffer
from xtuner.v1.rl.rollout.trace_store import release_and_discard_rollout_groups

import redrb
from redrb.compat.xtuner import ReplayBuffer

IDENTITY = "looks into the objects that were put, of which the buffer holds copies"

FAILING = {
    "test_common_put_defaults_to_retryable_expired_group": IDENTITY,
    "test_common_refresh_staleness_drops_only_non_retryable_expired_groups": IDENTITY,
    "test_refresh_staleness_batches_non_retryable_release_outside_lock": IDENTITY,
    "test_fit_accepts_async_strategy_manager_on_colocate_path": "puts objects of its own class",
}

_client = redrb.connect()
_model = tempfile.TemporaryDirectory()


def _write_model(folder: str) -> None:
    """Write what XTuner's checkpoint tests read of a model: a tokenizer of bytes, and sizes."""
    alphabet = ["<eos>", *pre_tokenizers.ByteLevel.alphabet()]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    fast.save_pretrained(folder)
    Qwen3Config(vocab_size=len(vocabulary), hidden_size=8, num_hidden_layers=1).save_pretrained(
        folder
    )


def _build(order: Any) -> ReplayBuffer:
    return ReplayBuffer(
        _client,
        order=order,
        namespace=uuid.uuid4().hex,
        rollout_type=RolloutState,
        on_discard=release_and_discard_rollout_groups,
    )


os.environ.setdefault("XTUNER_USE_SGLANG", "1")
if "QWEN3_4B_PATH" not in os.environ:
    _write_model(_model.name)
    os.environ["QWEN3_4B_PATH"] = _model.name
replay_buffer.SyncReplayBufferConfig.build = lambda _: _build("fifo")
replay_buffer.AsyncReplayBufferConfig.build = lambda _: _build("stalest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in FAILING:
            item.add_marker(pytest.mark.xfail(reason=FAILING[item.name], strict=True))
