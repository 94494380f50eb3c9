"""`Submission`: the future of a version that a thread publishes beside training."""

from __future__ import annotations

from concurrent.futures import Future

from redrb.weights.wire.manifest import WeightVersion


class Submission(Future[WeightVersion]):
    """The future of a submitted version; it cannot be cancelled.

    Attributes:
        seen: Whether a caller has asked for the outcome.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> WeightVersion:
        """Return the version, or raise the error of its publishing."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the publishing, None if the version is published."""
        error = super().exception(timeout)
        self.seen = True
        return error
