"""The commands of `redrb`: one module each, which adds its arguments and runs it.

Modules of the package that a command runs are imported when it runs: `redrb --help` stays quick.
"""
