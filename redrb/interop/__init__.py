"""Trainers of other libraries on a task: `redrb.interop.trl` and `redrb.interop.torchrl`.

Each module needs its library, which the extra of the same name installs: `trl`, `torchrl`.
"""
