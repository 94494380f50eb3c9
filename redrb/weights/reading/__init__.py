"""From Redis into a reader's models: find versions, fetch and check them, load or swap them in."""
