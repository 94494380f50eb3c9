"""LoRA adapters: a model's layers, checks, and the exact merge into base weights."""
