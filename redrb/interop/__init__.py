"""Interfaces of other libraries on a task: `coati` (ColossalAI), `trl` and `torchrl`.

`redrb.interop.trl` and `redrb.interop.torchrl` need their libraries, which the extras of the same
names install.
"""
