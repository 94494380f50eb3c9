"""Fuzzing of everything that reads input of unknown origin; `make fuzz` runs it."""
