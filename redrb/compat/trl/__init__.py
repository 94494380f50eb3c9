"""TRL's trainers on a task, with the makers' log-probabilities. Needs the extra `trl`.

`TaskRollouts` feeds `trl.GRPOTrainer`; `TaskRolloutWorker` and `PublishedWeights` feed
`trl.experimental.async_grpo.AsyncGRPOTrainer`. Public names stand in `__init__.pyi` and load at
their first use: TRL warns when its experimental modules are imported.
"""

import lazy_loader

from redrb.checks import require_package

require_package("trl", extra="trl")
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
