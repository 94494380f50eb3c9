"""Published weights as they are stored in Redis: manifests, chunks, deltas."""
