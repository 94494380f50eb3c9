"""Metrics for Prometheus, TensorBoard and Weights & Biases.

`redrb exporter` serves the figures of a namespace, a worker serves its own; docs/metrics.md.
"""
