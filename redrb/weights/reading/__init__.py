"""From Redis into a maker's models: which way, where the copy is kept, when it is swapped in."""
