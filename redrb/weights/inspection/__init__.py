"""Published weights listed, compared, watched, deleted, and copied from and to files.

The commands in `redrb/commands/weights/` print the results.
"""
