"""Metrics for Prometheus, TensorBoard and Weights & Biases.

`redrb exporter` serves the figures of a namespace and of its workers; docs/reference/metrics.md.
"""
