"""One copy of published weights for all readers on a host, in shared memory."""
