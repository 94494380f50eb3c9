"""Groups of slime's and miles' `Sample` on streams; `redrb.compat.slime` and `redrb.compat.miles`.

A job has three tasks. `math` holds finished groups for the trainer. `math.prompts` holds an entry
for each prompt that was begun: its id is the prompt's place in the data set, counted from 1.
`math.returned` holds groups that go on later: aborted ones, and those that were left over. A group
moves from one task to the next exactly once (docs/how-to/stages.md).
"""

from redrb.compat.sample_groups.data_source import GroupDataSource
from redrb.compat.sample_groups.job import JobGroups, TakenGroup, job_groups

__all__ = ["GroupDataSource", "JobGroups", "TakenGroup", "job_groups"]
