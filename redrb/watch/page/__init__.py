"""The live page of a namespace: `redrb dashboard` serves it (docs/dashboard.md)."""
