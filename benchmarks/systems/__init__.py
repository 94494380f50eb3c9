"""The systems that the benchmarks compare, a module each.

Every module has three functions. `produce(job)` and `consume(job)` run in spawned processes; they
put `job.groups` groups of the shape, and take them as padded batches of tensors. `version()` names
the system's version, and raises ImportError if the system is not installed.
"""

from benchmarks.systems.job import TIMEOUT_S, Job

__all__ = ["TIMEOUT_S", "Job"]
