"""From a trainer to Redis: full versions, deltas, shards of ranks."""
