"""Between models and bytes: tensors by name, their layout, their bytes without a copy."""
