"""Small jobs of TRL for tests: a model from a config, a tokenizer, a maker that needs no model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

import redrb
from redrb.algorithms import action_log_probs
from redrb.errors import AdmissionTimeout

VOCABULARY, PAD, EOS = 24, 0, 3


def tiny_model() -> LlamaForCausalLM:
    """Return the same small causal model each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def word(token: int) -> str:
    """Return the text of a token; none begins with another, which special tokens would cut off."""
    return f"w{token:02}"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word a token."""
    words = {word(number): number for number in range(VOCABULARY)}
    tokens = Tokenizer(WordLevel(words, unk_token=word(1)))
    tokens.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        unk_token=word(1),
        pad_token=word(PAD),
        eos_token=word(EOS),
        padding_side="left",
    )


def config(output: Path, **options: Any) -> GRPOConfig:
    """Return a configuration for groups of two samples on the CPU."""
    return GRPOConfig(
        **{
            "output_dir": str(output),
            "num_generations": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "shuffle_dataset": False,
            **options,
        }
    )


class ScriptedMaker:
    """Puts groups of two random completions with the tiny model's log-probabilities.

    Args:
        shifts: Subtracted from the log-probabilities of each sample.
        tool: The second token of each completion is the answer of a tool.
        extras: Extras of each sample.
    """

    def __init__(
        self,
        shifts: tuple[float, float] = (0.0, 0.0),
        *,
        tool: bool = False,
        extras: dict[str, Any] | None = None,
    ) -> None:
        self.model = tiny_model().eval()
        self.dice = torch.Generator().manual_seed(1)
        self.shifts, self.tool, self.extras = shifts, tool, extras or {}

    def put(self, stream: redrb.ExperienceStream, *, groups: int) -> None:
        """Put groups with rewards 0 and 1."""
        for _ in range(groups):
            stream.put(self.group(), policy_version=1)

    @torch.no_grad()
    def group(self) -> list[redrb.BufferItem]:
        """Return two samples of 3 tokens of the prompt and 4 of the completion."""
        tokens = torch.randint(4, VOCABULARY, (2, 7), generator=self.dice)
        tokens[1, :3] = tokens[0, :3]
        log_probs = action_log_probs(self.model(tokens).logits, tokens, 4)
        mask = torch.tensor([True, not self.tool, True, True])
        zeros = torch.zeros(4)
        return [
            redrb.BufferItem(
                sequences=tokens[row],
                action_log_probs=log_probs[row] - self.shifts[row],
                values=zeros,
                reward=torch.tensor(float(row)),
                kl=zeros,
                advantages=zeros,
                action_mask=mask,
                extras=self.extras,
            )
            for row in range(2)
        ]


@contextmanager
def making(client: redrb.Client, stream: redrb.ExperienceStream) -> Iterator[None]:
    """Put groups with rights and the newest version of "policy", in a thread, until the end."""
    ended = threading.Event()
    subscriber = redrb.WeightSubscriber(client, "policy", namespace=stream.namespace)
    maker = ScriptedMaker()

    def run() -> None:
        newest = subscriber.wait(timeout=60)
        while not ended.is_set():
            try:
                with stream.admit(3, least=1, timeout=0.2) as right:
                    newest = subscriber.latest() or newest
                    groups = [maker.group() for _ in range(right.left)]
                    stream.put_many(groups, policy_version=newest.version, admission=right)
            except AdmissionTimeout:
                continue

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()
