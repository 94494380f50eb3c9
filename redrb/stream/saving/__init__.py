"""A task in a file: saved while others use it, resumed in one step."""
