"""ColossalAI's example scripts (`1m1t`, `1m2t`, `2m1t`, `2m2t`) on small models.

Each actor of the originals is a thread here. Their arguments, and the order of their calls, are
kept; `sync_models_from_trainers`, which they comment out, is on.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from redrb import DetachedPPOTrainer, ExperienceMakerHolder, Strategy
from tests.conftest import REAL
from tests.networks import TokenNetwork

VOCABULARY, PAD = 16, 1
EXPERIENCE_BATCH, EXPERIENCE_STEPS, TRAIN_BATCH, UPDATE_STEPS = 8, 4, 4, 2


def rewards(completions: Any) -> Tensor:
    return completions.sequences.float().mean(1) / VOCABULARY


def model_fn() -> tuple[Any, ...]:
    return (
        TokenNetwork(VOCABULARY, VOCABULARY),
        TokenNetwork(1, VOCABULARY),
        rewards,
        TokenNetwork(VOCABULARY, VOCABULARY),
    )


def trainer_model_fn() -> tuple[Any, ...]:
    return TokenNetwork(VOCABULARY, VOCABULARY), TokenNetwork(1, VOCABULARY)


def receivers(sender: int, senders: int, others: int, *, idle: bool) -> list[int]:
    """Return the receivers of a sender, as `get_receivers_per_sender` of the originals does."""
    targets = [other for other in range(others) if other % senders == sender]
    return targets if targets or idle else [sender % others]


def tokenize(texts: list[str]) -> dict[str, Tensor]:
    """Return all that a tokenizer with padding on the right returns."""
    tokens = [[2 + ord(letter) % 14 for letter in text] for text in texts]
    ids = torch.tensor([row + [PAD] * (6 - len(row)) for row in tokens])
    counts = torch.tensor([[1] * len(row) + [0] * (6 - len(row)) for row in tokens])
    return {"input_ids": ids, "attention_mask": counts, "token_type_ids": 0 * ids}


def build_dataloader(loaders: list[int]) -> DataLoader[Any]:
    loaders.append(1)
    prompts: Any = [f"{number:02}" * (1 + number % 3) for number in range(2 * EXPERIENCE_BATCH)]
    return DataLoader(prompts, batch_size=EXPERIENCE_BATCH, shuffle=True, collate_fn=tokenize)


@pytest.fixture
def run():
    """Run functions beside each other, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    def all_of(jobs):
        threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)

    return all_of


@pytest.mark.parametrize(
    ("url", "makers", "trainers"),
    [("fake", 1, 2), (next(iter(REAL)), 2, 1)],
    indirect=["url"],
)
def test_makers_and_trainers(client, namespace, run, monkeypatch, makers, trainers):
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")  # restored at the end

    def env_info(rank, size):
        port = {"master_port": "1", "master_addr": "127.0.0.1"}
        return {"local_rank": "0", "rank": str(rank), "world_size": str(size), **port}

    strategy_fn, loaders = partial(Strategy, "cpu"), list[int]()
    with ExitStack() as scope:
        experience_holders = [
            scope.enter_context(
                ExperienceMakerHolder(
                    detached_trainer_name_list=[
                        f"trainer{x}" for x in receivers(i, makers, trainers, idle=False)
                    ],
                    strategy_fn=strategy_fn,
                    model_fn=model_fn,
                    env_info=env_info(i, makers),
                    kl_coef=0.1,
                    debug=True,
                    sync_models_from_trainers=True,
                    max_length=12,
                    do_sample=True,
                    temperature=1.0,
                    top_k=50,
                    pad_token_id=PAD,
                    eos_token_id=PAD,
                    eval_performance=True,
                    use_cache=True,
                    name=f"maker{i}",
                    client=client,
                    namespace=namespace,
                )
            )
            for i in range(makers)
        ]
        learners = [
            scope.enter_context(
                DetachedPPOTrainer(
                    experience_maker_holder_name_list=[
                        f"maker{x}" for x in receivers(i, trainers, makers, idle=True)
                    ],
                    strategy_fn=strategy_fn,
                    model_fn=trainer_model_fn,
                    env_info=env_info(i, trainers),
                    train_batch_size=TRAIN_BATCH,
                    buffer_limit=1,
                    eval_performance=True,
                    debug=True,
                    name=f"trainer{i}",
                    client=client,
                    namespace=namespace,
                    timeout=20,
                )
            )
            for i in range(trainers)
        ]
        for trainer in learners:
            trainer.sync_models_to_remote_makers()
        samples = EXPERIENCE_BATCH * EXPERIENCE_STEPS * makers
        total_steps = samples // (trainers * TRAIN_BATCH)
        run(
            [
                partial(
                    maker.workingloop,
                    partial(build_dataloader, loaders),
                    num_steps=EXPERIENCE_STEPS,
                )
                for maker in experience_holders
            ]
            + [partial(trainer.fit, total_steps, UPDATE_STEPS, 2) for trainer in learners]
        )
        assert len(loaders) == makers
        assert [t.buffer.stream.stats().ledger.acked for t in learners] == (
            [samples // trainers] * trainers
        )
        assert all(t.weight_version > total_steps // UPDATE_STEPS for t in learners)
        assert all(maker.policy_version for maker in experience_holders)
