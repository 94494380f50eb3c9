"""Benchmarks: each runs with one command and prints ratios against a floor of the same run."""
