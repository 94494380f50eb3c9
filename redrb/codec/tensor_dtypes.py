"""Torch's dtypes that the wire has."""

from __future__ import annotations

from typing import Final

from redrb.codec.dtypes import DTYPES

BY_TORCH: Final = {dtype.tensor: dtype for dtype in DTYPES}
"""The wire's dtype of each dtype of tensors; other dtypes cannot be stored."""
