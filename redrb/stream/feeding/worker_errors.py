"""Errors of worker processes, as torch's DataLoader can make them again: from one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redrb.errors import BatchTimeout, RedrbError, StoreUnavailable, TaskMismatch


class WorkerBatchTimeout(BatchTimeout):
    """In a worker process no full batch came in time; what is known is in the message."""

    def __init__(self, message: str) -> None:
        self.task, self.wanted, self.available, self.waited_s = "", 0, 0, 0.0
        self.blocked = self.expired = self.others = 0
        RedrbError.__init__(self, message)


class WorkerStoreUnavailable(StoreUnavailable):
    """A worker process could not reach Redis; where is in the message."""

    def __init__(self, message: str) -> None:
        super().__init__(message, where="")


class WorkerTaskMismatch(TaskMismatch):
    """A worker process found the task with other settings; which is in the message."""

    def __init__(self, message: str) -> None:
        self.task, self.differences = "", {}
        RedrbError.__init__(self, message)


@contextmanager
def tellable() -> Iterator[None]:
    """Raise errors whose constructors want more than a message as ones that want no more."""
    try:
        yield
    except BatchTimeout as error:
        raise WorkerBatchTimeout(str(error)) from error
    except StoreUnavailable as error:
        raise WorkerStoreUnavailable(str(error)) from error
    except TaskMismatch as error:
        raise WorkerTaskMismatch(str(error)) from error
