"""Safetensors files and PEFT's folders."""
