"""A run of makers, trainers and weights under random faults, and the checks of what they report.

`python -m tests.chaos --help` shows the options; docs/contributing/chaos.md describes the run.
"""
