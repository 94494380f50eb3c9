"""Whole jobs on this machine: `redrb run` and `redrb demo` start a server and workers."""
