"""vLLM's weight transfer backend "redrb": servers load published weights straight from Redis.

`vllm serve MODEL --weight-transfer-config '{"backend": "redrb"}'` where redrb is installed beside
vLLM, 0.32 or newer. See docs/how-to/inference-server.md.
"""

from __future__ import annotations


def register() -> None:
    """Name the backend to vLLM, which calls this in each of its processes.

    Nothing else is imported until a server asks for the backend.
    """
    try:
        from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
            WeightTransferEngineFactory,
        )
    except ImportError:  # before 0.32: servers load folders
        return
    WeightTransferEngineFactory.register_engine(
        "redrb", "redrb.compat.vllm.transfer", "RedrbWeightTransferEngine"
    )
