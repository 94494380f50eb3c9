"""Base of PPO's and GRPO's steps: micro-batches, gradients, the forward pass, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from redrb.algorithms.batches import (
    PROXIMAL_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    MicroBatches,
    TrainingBatch,
)
from redrb.algorithms.log_probs import action_log_probs, entropy
from redrb.algorithms.losses import (
    Aggregation,
    action_ratio,
    grpo_loss,
    kl_estimate,
    masked_mean,
    normalised,
    row_mean,
    truncated_importance,
)
from redrb.algorithms.models import action_logits, device_of
from redrb.checks import check_choice
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience


def check_positive(**options: float | None) -> None:
    """Raise ConfigError for the first option that is neither None nor above 0."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} {value} must be above 0.")


def check_not_negative(**options: float) -> None:
    """Raise ConfigError for the first option that is below 0."""
    for name, value in options.items():
        if not value >= 0:
            raise ConfigError(f"{name} {value} must be at least 0.")


LARGEST = "_max"
"""End of the names of metrics of which the largest counts; all others are added up."""

LossOf: TypeAlias = Callable[[TrainingBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""Returns the loss and the metrics of a part of a batch: its shares of those of the whole."""


class PolicyStep:
    """Base of steps that train an actor by the ratio of its policy to an earlier one.

    Gradients and metrics are those of all ranks if the actor is replicated
    (DistributedDataParallel) or sharded (FSDP2); all ranks then take the same number of steps.

    Attributes:
        algorithm: Name of the algorithm, for error messages.

    Args:
        actor: Policy in training; `redrb.algorithms.models` says how it is called.
        aggregation: How losses of actions become one number.
        clip: The lower epsilon of the ratio, > 0.
        clip_high: The upper epsilon (DAPO's "clip higher", 0.28 there); None: `clip`.
        max_grad_norm: Largest gradient norm of each network; None: no limit.
        temperature: Temperature at which the maker sampled; divides the logits.
        truncated_importance: Cap of truncated importance sampling, such as 2: the ratio is then
            taken to the trainer's policy before the batch, and the policy loss is multiplied by
            `redrb.algorithms.truncated_importance`. It costs one forward pass a batch. None: the
            ratio is taken to the maker's log-probabilities.
        micro_batch_size: Most samples in a forward pass; the step is that of the whole batch. None:
            no limit.
        micro_batch_tokens: Most tokens in a forward pass, padding included. None: no limit.
        normalise_advantages: Give advantages mean 0 and variance 1 over the batch's actions, on
            each rank over those of its own batch.

    Raises:
        ConfigError: An option is out of range.
    """

    algorithm: str
    beta = 0.0
    entropy_coef = 0.0

    def __init__(
        self,
        actor: nn.Module,
        *,
        aggregation: Aggregation,
        clip: float = 0.2,
        clip_high: float | None = None,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        truncated_importance: float | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        normalise_advantages: bool = False,
    ) -> None:
        check_positive(
            clip=clip,
            clip_high=clip_high,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
            truncated_importance=truncated_importance,
        )
        check_choice("aggregation", aggregation, get_args(Aggregation))
        self.actor = actor
        self.clip, self.clip_high, self.max_grad_norm = clip, clip_high, max_grad_norm
        self.aggregation: Aggregation = aggregation
        self.temperature, self.truncated_importance = temperature, truncated_importance
        self.normalise_advantages = normalise_advantages
        self.micro_batches = MicroBatches(micro_batch_size, micro_batch_tokens)
        self._sharded = any(hasattr(parameter, "full_tensor") for parameter in actor.parameters())
        self._ranks = self._sharded or isinstance(actor, nn.parallel.DistributedDataParallel)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; override it, for instance to scale the loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def actor_loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss, float32 `[]`, and its metrics.

        Of a micro-batch these are shares, which add up to the loss and metrics of the whole batch;
        of metrics whose names end with `_max` the largest counts.
        """
        mask, totals = batch.action_mask, batch.totals
        reference = batch.padded_as_actions(REFERENCE_LOG_PROBS) if self.beta > 0 else None
        advantages = self._advantages(batch)
        logits, log_probs = self._forward(batch)
        loss = grpo_loss(
            log_probs,
            batch.old_log_probs,
            advantages,
            mask,
            clip=self.clip,
            clip_high=self.clip_high,
            beta=self.beta,
            reference_log_probs=reference,
            aggregation=self.aggregation,
            weights=batch.weights,
            policy_weights=batch.policy_weights,
            totals=totals,
        )
        with torch.set_grad_enabled(self.entropy_coef > 0 and torch.is_grad_enabled()):
            mean_entropy = masked_mean(entropy(logits, temperature=self.temperature), mask, totals)
        metrics = {"actor_loss": loss, "entropy": mean_entropy}
        with torch.no_grad():
            ratio = action_ratio(log_probs, batch.old_log_probs, mask)
            high = self.clip if self.clip_high is None else self.clip_high
            outside = (ratio < 1 - self.clip) | (ratio > 1 + high)
            metrics |= {
                "approx_kl": masked_mean(ratio - 1 - ratio.log(), mask, totals),  # k3
                "clip_fraction": masked_mean(outside.float(), mask, totals),
                "ratio_mean": masked_mean(ratio, mask, totals),
                "ratio_max": ratio.masked_fill(~mask, 0.0).amax(),
            }
            if reference is not None:
                kl = kl_estimate(log_probs, reference, mask)
                metrics["reference_kl"] = masked_mean(kl, mask, totals)
        return (loss - self.entropy_coef * mean_entropy if self.entropy_coef else loss), metrics

    def batch(self, experience: Experience, network: nn.Module) -> TrainingBatch:
        """Return the batch on the network's device, with the totals of all ranks."""
        batch = TrainingBatch.of(experience, algorithm=self.algorithm, device=device_of(network))
        return replace(batch, totals=batch.totals.of_ranks(self._mean))

    def parts(self, batch: TrainingBatch) -> list[TrainingBatch]:
        """Return the micro-batches of a batch, on all ranks the same number."""
        parts = self.micro_batches.split(batch)
        most = self._most(torch.tensor([len(parts)], device=batch.sequences.device))
        return parts + [parts[-1].without_actions()] * (int(most[0]) - len(parts))

    def accumulate(
        self, network: nn.Module, batch: TrainingBatch, loss_of: LossOf
    ) -> dict[str, Tensor]:
        """Add the gradients of a batch, part by part; return the metrics of the whole batch."""
        metrics: dict[str, Tensor] = {}
        parts = self.parts(batch)
        replicated = isinstance(network, nn.parallel.DistributedDataParallel)
        for number, part in enumerate(parts, 1):
            # replicas average in the last part; shards reduce each, as whole ones would not fit
            partial = replicated and number < len(parts)
            with network.no_sync() if partial else nullcontext():  # type: ignore[operator]
                loss, shares = loss_of(part)
                self.backward(loss)
            for name, value in shares.items():
                share = value.detach()  # keeps no graph
                if name in metrics and name.endswith(LARGEST):
                    share = torch.maximum(metrics[name], share)
                elif name in metrics:
                    share = metrics[name] + share
                metrics[name] = share
        return metrics

    def _end(
        self,
        batch: TrainingBatch,
        metrics: Mapping[str, Tensor],
        networks: Mapping[str, nn.Module],
        optimizers: Iterable[Optimizer],
    ) -> dict[str, float]:
        """Clip each network's gradients, then step all optimizers, or none.

        Args:
            metrics: Metrics of this rank, `[]` each.
            optimizers: Their optimizers, of which several may be the same object.

        Returns:
            The metrics over all ranks, with lengths, and `<name>_grad_norm` before clipping.

        Raises:
            RecordError: A gradient is not finite. No optimizer was stepped.
        """
        limit = torch.inf if self.max_grad_norm is None else self.max_grad_norm
        norms: dict[str, Tensor] = {}
        for name, network in networks.items():
            norm: Any = clip_grad_norm_(list(network.parameters()), limit)
            norms[f"{name}_grad_norm"] = norm.full_tensor() if self._sharded else norm
        distinct = list({id(optimizer): optimizer for optimizer in optimizers}.values())
        for name, norm in norms.items():
            if not bool(norm.isfinite()):
                for optimizer in distinct:
                    optimizer.zero_grad()
                raise RecordError(
                    f"{name} is {norm.item()}: a field of the batch is not finite, or training has "
                    "diverged. The weights are as they were: reject this batch, or take smaller "
                    "steps."
                )
        for optimizer in distinct:
            optimizer.step()
        lengths = batch.action_mask.sum(1).float()
        of_lengths = {"length_mean": row_mean(lengths, batch.totals), "length_max": lengths.amax()}
        found = {**metrics, **of_lengths, **norms}
        by_device: dict[torch.device, list[str]] = {}  # each is copied to the host at once
        for name, value in found.items():
            by_device.setdefault(value.device, []).append(name)
        floats: dict[str, float] = {}
        for names in by_device.values():
            values = torch.stack([found[name].detach().float() for name in names])
            means, largest = self._mean(values).tolist(), self._most(values).tolist()
            for name, mean, most in zip(names, means, largest, strict=True):
                floats[name] = most if name.endswith(LARGEST) else mean
        return {name: floats[name] for name in found}

    def _mean(self, values: Tensor) -> Tensor:
        total = self._reduced(values, distributed.ReduceOp.SUM)
        return total / distributed.get_world_size() if self._ranks else total

    def _most(self, values: Tensor) -> Tensor:
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: Tensor, how: distributed.ReduceOp.RedOpType) -> Tensor:
        if not self._ranks:
            return values
        on_accelerator = distributed.get_backend() == "nccl"
        reduced = values.detach().to("cuda" if on_accelerator else "cpu", copy=True)
        distributed.all_reduce(reduced, how)
        return reduced.to(values.device)

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
            experience.tensors[PROXIMAL_LOG_PROBS] = found
        mask, cap = batch.action_mask, self.truncated_importance
        weights = truncated_importance(found, batch.old_log_probs, mask, cap=cap)
        metrics = {
            "importance_mean": masked_mean(weights, mask, batch.totals),
            "truncated_fraction": masked_mean((weights >= cap).float(), mask, batch.totals),
        }
        return replace(batch, old_log_probs=found, policy_weights=weights), metrics

    def _forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        logits = action_logits(
            self.actor, batch.sequences, batch.attention_mask, batch.actions, inputs=batch.inputs
        )
        log_probs = action_log_probs(
            logits, batch.sequences, batch.actions, temperature=self.temperature
        )
        return logits, log_probs

    def _advantages(self, batch: TrainingBatch) -> Tensor:
        """Return the advantages `[B, A]`, normalised over the whole batch if that is asked for."""
        if not self.normalise_advantages:
            return batch.per_action("advantages")
        whole = batch if batch.place is None else batch.place.whole
        scaled = normalised(whole.per_action("advantages"), whole.action_mask)
        return scaled if batch.place is None else batch.place.of(scaled)
