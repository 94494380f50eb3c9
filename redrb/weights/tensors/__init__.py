"""Tensors between models and bytes: by name, laid out, checked, copied, or used in place."""
