"""The state of a namespace: what runs, how fast, how stale, and what is wrong.

Every command, page and exporter that shows the state reads it from here.
"""
