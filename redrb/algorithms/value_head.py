"""`ValueHead`: makes a critic of any causal model."""

from __future__ import annotations

from torch import Tensor, nn

from redrb.algorithms.model_inputs import NO_INPUTS, ModelInputs
from redrb.algorithms.models import call, output_tensor
from redrb.errors import ConfigError, RecordError


class ValueHead(nn.Module):
    """A trunk with a linear head that gives a value at every position, float32 `[B, S]`.

    The value at a position is that of the state after its token, so the value before an action is
    one position earlier, like the logits that chose the action. The head starts at 0.

    Args:
        trunk: A module that returns hidden states `[B, S, H]`, or a Hugging Face model; of a causal
            model only the trunk is used, without the vocabulary head. It is not copied: pass
            `copy.deepcopy(actor)` unless actor and critic shall share it.
        hidden_size: Width H of the hidden states; None: `trunk.config.hidden_size`.

    Raises:
        ConfigError: The width of the hidden states is not known.
    """

    def __init__(self, trunk: nn.Module, *, hidden_size: int | None = None) -> None:
        super().__init__()
        if hidden_size is None:
            hidden_size = getattr(getattr(trunk, "config", None), "hidden_size", None)
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise ConfigError(
                f"hidden_size {hidden_size!r} of the trunk {type(trunk).__name__}: give "
                "ValueHead(trunk, hidden_size=...) the width of its hidden states."
            )
        headless = getattr(trunk, "base_model", trunk)
        self.trunk: nn.Module = headless if hasattr(trunk, "base_model_prefix") else trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        first = next(self.trunk.parameters(), None)
        if first is not None:
            self.head.to(first.device)

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        inputs: ModelInputs = NO_INPUTS,
    ) -> Tensor:
        """Return the value of every position, float32 `[B, S]`.

        Args:
            sequences: Token ids, int64 `[B, S]`.
            attention_mask: 1 where a token counts, `[B, S]`; None: all tokens count.
            inputs: Extra tensors, such as `pixel_values`, for the trunk.

        Raises:
            RecordError: The trunk's hidden states have another shape.
        """
        role = f"the trunk {type(self.trunk).__name__}"
        hidden = output_tensor(
            call(self.trunk, sequences, attention_mask, inputs=inputs), ("last_hidden_state",), role
        )
        width = self.head.in_features
        if hidden.dim() != 3 or hidden.shape[2] != width:
            raise RecordError(
                f"{role} answered with shape {list(hidden.shape)}, not "
                f"[{', '.join(map(str, sequences.shape))}, {width}]."
            )
        values: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return values.squeeze(2).float()
