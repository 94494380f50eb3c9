"""Admission: makers wait for the right to begin a group, so that no group comes too late."""

from redrb.stream.admission.admission import Admission

__all__ = ["Admission"]
