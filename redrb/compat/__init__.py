"""Interfaces of other libraries on a task: ColossalAI's `coati`, `xtuner`, `trl`, `torchrl`.

`redrb.compat.trl` and `redrb.compat.torchrl` need their libraries, which the extras of the same
names install.
"""
