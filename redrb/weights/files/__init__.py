"""Weights in files: safetensors, and PEFT's adapter folders."""
