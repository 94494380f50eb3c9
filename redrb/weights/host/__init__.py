"""One copy of the weights for all readers on a host, in shared memory."""
