"""Base of PPO's and GRPO's training steps: micro-batches, the actor's forward pass, its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_

from redrb.algorithms.aggregation import Aggregation, check_choice, masked_mean
from redrb.algorithms.batches import PROXIMAL_LOG_PROBS, TrainingBatch
from redrb.algorithms.gradients import Gradients
from redrb.algorithms.log_probs import action_log_probs
from redrb.algorithms.losses import truncated_importance
from redrb.algorithms.metrics import StepMetrics
from redrb.algorithms.micro_batches import MicroBatches
from redrb.algorithms.models import action_logits, device_of
from redrb.algorithms.optimizer_step import check_positive
from redrb.experience import Experience


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of a model: of all ranks, if it is replicated or sharded over them."""
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    if sharded or isinstance(model, nn.parallel.DistributedDataParallel):
        return RankGradients(sharded=sharded)
    return Gradients()


class RankGradients(Gradients):
    """Averages over the ranks of torch.distributed.

    Args:
        sharded: Whether gradients are sharded: each micro-batch then reduces them, because whole
            gradients would not fit into memory.
    """

    def __init__(self, *, sharded: bool = False) -> None:
        self._sharded = sharded

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch; replicas average gradients in the last one."""
        if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
            context: AbstractContextManager[object] = model.no_sync()
            return context
        return nullcontext()

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradients of a model, of all its shards, to the norm `limit` at most."""
        norm: Any = clip_grad_norm_(list(model.parameters()), limit)
        whole: Tensor = norm.full_tensor() if self._sharded else norm
        return whole

    def mean(self, values: Tensor) -> Tensor:
        """Return numbers `[N]` averaged over the ranks."""
        return self._reduced(values, distributed.ReduceOp.SUM) / distributed.get_world_size()

    def most(self, values: Tensor) -> Tensor:
        """Return the largest of each number `[N]` on any rank."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: distributed.ReduceOp.RedOpType) -> Tensor:
        on_accelerator = distributed.get_backend() == "nccl"
        device = torch.device("cuda") if on_accelerator else torch.device("cpu")
        reduced = values.detach().to(device, copy=True)
        distributed.all_reduce(reduced, how)
        return reduced.to(values.device)


LossOf: TypeAlias = Callable[[TrainingBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Returns the loss and the metrics of a part of a batch: its shares of those of the whole."""


class PolicyStep:
    """Base of steps that train an actor by the ratio of its policy to an earlier one.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        algorithm: Name of the algorithm, for error messages.
        clip: The lower epsilon of the ratio, > 0.
        clip_high: The upper epsilon; None: `clip`.
        max_grad_norm: Largest gradient norm of each network; None: no limit.
        aggregation: How losses of actions become one number.
        temperature: Temperature at which the maker sampled; divides the logits.
        truncated_importance: Cap of truncated importance sampling; None: the ratio is taken to the
            maker's log-probabilities.
        micro_batch_size: Most samples in a forward pass; None: no limit.
        micro_batch_tokens: Most tokens in a forward pass, padding included; None: no limit.
        gradients: How gradients are accumulated and averaged; None: as the actor is placed.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        algorithm: str,
        clip: float,
        clip_high: float | None,
        max_grad_norm: float | None,
        aggregation: Aggregation,
        temperature: float,
        truncated_importance: float | None,
        micro_batch_size: int | None,
        micro_batch_tokens: int | None,
        gradients: Gradients | None,
    ) -> None:
        check_positive(
            clip=clip,
            clip_high=clip_high,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            truncated_importance=truncated_importance,
        )
        check_choice("aggregation", aggregation, get_args(Aggregation))
        self.actor, self.algorithm = actor, algorithm
        self.clip, self.clip_high, self.max_grad_norm = clip, clip_high, max_grad_norm
        self.aggregation: Aggregation = aggregation
        self.temperature, self.truncated_importance = temperature, truncated_importance
        self.micro_batches = MicroBatches(micro_batch_size, micro_batch_tokens)
        self.gradients = gradients or gradients_of(actor)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; override it, for instance to scale the loss."""
        self.gradients.backward(loss)

    def batch(self, experience: Experience, network: nn.Module) -> TrainingBatch:
        """Return the batch on the network's device, with the totals of all ranks."""
        batch = TrainingBatch.of(experience, algorithm=self.algorithm, device=device_of(network))
        return replace(batch, totals=batch.totals.of_ranks(self.gradients.mean))

    def parts(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """Return the micro-batches of a batch, on all ranks the same number."""
        parts = self.micro_batches.split(batch)
        most = self.gradients.most(torch.tensor([len(parts)], device=batch.sequences.device))
        return parts + [parts[-1].without_actions()] * (int(most[0]) - len(parts))

    def accumulate(
        self, network: nn.Module, batch: TrainingBatch, loss_of: LossOf
    ) -> dict[str, Tensor]:
        """Add the gradients of a batch, part by part; return the metrics of the whole batch."""
        metrics, parts = StepMetrics(), self.parts(batch)
        for number, part in enumerate(parts, 1):
            with self.gradients.accumulating(network, last=number == len(parts)):
                loss, found = loss_of(part)
                self.backward(loss)
            metrics.add(found)
        return metrics.found

    def proximal(
        self, experience: Experience, batch: TrainingBatch
    ) -> tuple[TrainingBatch, dict[str, Tensor]]:
        """Return the batch with the ratio's denominator, and metrics of truncated weights.

        Without truncated importance sampling it is the batch itself. With it the ratio is taken to
        the actor before it trained on the batch; these log-probabilities are noted in
        `experience.tensors` for later epochs.
        """
        if self.truncated_importance is None:
            return batch, {}
        if PROXIMAL_LOG_PROBS in experience.tensors:
            found = batch.padded_as_actions(PROXIMAL_LOG_PROBS)
        else:
            parts = self.parts(batch)
            with torch.no_grad():
                found = batch.joined(parts, [self._forward(part)[1] for part in parts])
            experience.tensors[PROXIMAL_LOG_PROBS] = batch.stored(found)
        mask, cap = batch.action_mask, self.truncated_importance
        weights = truncated_importance(found, batch.old_log_probs, mask, cap=cap)
        metrics = {
            "importance_mean": masked_mean(weights, mask, batch.totals),
            "truncated_fraction": masked_mean((weights >= cap).float(), mask, batch.totals),
        }
        return replace(batch, old_log_probs=found, policy_weights=weights), metrics

    def _forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the actor's logits `[B, A, V]` and log-probabilities of the actions `[B, A]`."""
        logits = action_logits(
            self.actor, batch.sequences, batch.attention_mask, batch.actions, inputs=batch.inputs
        )
        log_probs = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self.temperature
        )
        return logits, log_probs

    @torch.no_grad()
    def _ratio_metrics(self, ratio: Tensor, batch: TrainingBatch) -> dict[str, Tensor]:
        """Return `approx_kl` (k3, old from current policy), `clip_fraction` and ratios."""
        mask, totals = batch.action_mask, batch.totals
        high = self.clip if self.clip_high is None else self.clip_high
        outside = (ratio < 1 - self.clip) | (ratio > 1 + high)
        return {
            "approx_kl": masked_mean(ratio - 1 - ratio.log(), mask, totals),
            "clip_fraction": masked_mean(outside.float(), mask, totals),
            "ratio_mean": masked_mean(ratio, mask, totals),
            "ratio_max": ratio.masked_fill(~mask, 0.0).amax(),
        }
