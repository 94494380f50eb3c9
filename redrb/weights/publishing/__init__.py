"""From a trainer to Redis: full versions, deltas, adapters."""
