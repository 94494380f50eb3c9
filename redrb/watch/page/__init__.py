"""The live page of a namespace: `redrb dashboard` serves it (docs/how-to/watch.md)."""
