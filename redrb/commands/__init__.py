"""The commands of `redrb`, one module each."""
