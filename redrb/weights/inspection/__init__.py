"""Published weights from outside: looked at, compared, and taken to files and back.

Does the work of the commands in `redrb/commands/weights/`.
"""
