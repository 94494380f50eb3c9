"""How a rank's process ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from torch import distributed


def leave() -> NoReturn:
    """End the process group and this process, without Python's own end.

    Threads of gloo outlive the group of a sharded model, and abort the process if one of them still
    holds a tensor of the last collective: https://github.com/pytorch/pytorch/pull/179291
    """
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
