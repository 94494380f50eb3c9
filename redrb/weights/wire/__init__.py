"""What lies in Redis: manifests, chunks, deltas."""
