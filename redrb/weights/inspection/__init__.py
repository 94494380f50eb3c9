"""Published weights from outside: looked at, compared, and taken to files and back.

What the commands `redrb weights ...` do; their arguments and output are in `redrb/commands/weights/`.
"""
