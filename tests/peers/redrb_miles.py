"""A plugin of pytest: runs miles' tests of its asynchronous rollout on redrb's data buffer.

Their data source is a fake one, which hands out no groups of redrb's tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from typing import Any

import peer_stand_ins  # noqa: F401
import pytest
from miles.rollout import fully_async_data_buffer, fully_async_rollout

from redrb.compat.miles import RedrbDataBuffer
from redrb.compat.sample_groups import job_groups


@pytest.fixture(autouse=True)
def on_redrb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put redrb's buffer in the place of miles' own, with a task for each test."""
    made = []

    class Buffer(RedrbDataBuffer):
        def __init__(self, input: Any) -> None:  # noqa: A002
            job = job_groups(input.args, "miles")
            job.has_source = True
            made.append(job)
            super().__init__(input)

    monkeypatch.setenv("REDRB_TASK", uuid.uuid4().hex)
    for module in (fully_async_data_buffer, fully_async_rollout):
        monkeypatch.setattr(module, "DefaultDataBuffer", Buffer)
    yield
    for job in made:
        job.close()


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run coroutines as pytest-asyncio does, which miles uses."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
