"""What slime's contract tests load by its path: redrb's rollout function, with arguments.

The tests give a rollout function no arguments and a data source of their own. This one has the same
signature, and gives redrb's the arguments that slime would give it.
"""

from __future__ import annotations

import functools
import uuid
from types import SimpleNamespace
from typing import Any

from redrb.compat.slime import RedrbDataSource, generate_rollout


@functools.wraps(generate_rollout)
def rollout(*given: Any, **named: Any) -> Any:
    _, rollout_id, _, *_ = given
    args = SimpleNamespace(
        redrb_task=uuid.uuid4().hex,
        redrb_rollout_function="test_plugin_rollout_contracts.valid_rollout_function",
        rollout_global_dataset=False,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
    )
    return generate_rollout(args, rollout_id, RedrbDataSource(args), **named)
