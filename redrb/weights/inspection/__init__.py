"""Published weights listed, compared, watched, deleted, and copied from and to files.

The commands in `redrb/cli/weights/` print the results.
"""
