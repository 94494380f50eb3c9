"""Interfaces of other libraries.

On streams: ColossalAI's `coati`, `xtuner`, `trl`, `torchrl`, `slime` and `miles`. On tables:
TransferQueue's, which verl uses, and NeMo RL's data plane. On the gateway:
`verifiers`, `openai_agents` and `openenv`, which import their libraries at the first call. On
weights: `vllm`.
`redrb.compat.trl` and `redrb.compat.torchrl` need their libraries, which the extras of the same
names install.
"""
