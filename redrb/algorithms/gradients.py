"""`Gradients`: how a training step accumulates, averages and clips gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


class Gradients:
    """Gradients of one process; `RankGradients` are those of several ranks.

    Steps call it with numbers of this rank; the methods `mean` and `most` are called by all ranks
    the same number of times, in the same order.
    """

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context of one micro-batch's forward and backward pass.

        Args:
            model: Network in training.
            last: Whether this is the step's last micro-batch of the network.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the parameters."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """Scale the gradients of a model to the norm `limit` at most; return the norm before."""
        return clip_grad_norm_(list(model.parameters()), limit)

    def mean(self, values: Tensor) -> Tensor:
        """Return numbers `[N]` averaged over the ranks."""
        return values

    def most(self, values: Tensor) -> Tensor:
        """Return the largest of each number `[N]` on any rank."""
        return values
