"""State of the random number generators of torch, CUDA, Python and numpy, for checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of all generators, in types that `torch.load(weights_only=True)` reads."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": (version, list(numbers), gauss),
        "numpy": (str(name), torch.tensor(np.asarray(keys, np.int64)), place, has_gauss, cached),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to a state that `random_state` returned.

    The state of CUDA is ignored if this machine has another number of GPUs.
    """
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
