"""Full batches of a task's stream, leased to a consumer until they are acknowledged."""
