"""Published weights from outside: looked at, compared, and taken to files and back.

What the commands `redrb weights ...` do; how they say it is in `redrb/commands/weights.py`.
"""
