"""The sections of the benchmark: each is one question, answered with figures of one run."""
