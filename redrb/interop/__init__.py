"""Trainers of other libraries on a task: `redrb.interop.trl` and `redrb.interop.torchrl`.

Each module needs its library: `pip install 'redrb[trl]'` or `'redrb[torchrl]'`.
"""
