"""Batches that nobody uses are given back, also while Redis is away."""

from __future__ import annotations

import logging
from typing import Any

from redrb.errors import LeaseLost, StoreError
from redrb.stream.take.lease import PartsLease

_log = logging.getLogger("redrb")


def hand_back(lease: PartsLease[Any]) -> None:
    """Requeue a batch that nobody uses; while Redis is away, the heartbeat thread does it later.

    What cannot be done now is logged, and not raised: the lease is over in any case.
    """
    try:
        if lease:
            lease.release()
    except LeaseLost as error:
        _log.warning("a batch could not be released: %s", str(error))
    except StoreError as error:
        _log.warning("a batch is requeued later: %s", str(error))  # a record keeps no frames
        lease.abandon()
