"""The recipes that redrb has: `redrb run NAME` runs them, and each is an example to copy."""
