"""The tasks of a run: created with their settings, relieved of rights of dead makers, and deleted.

All of it happens as a user does it, and not through the proxy.
"""

from __future__ import annotations

from contextlib import suppress

import redrb
from redrb.errors import AdmissionTimeout
from redrb.stream.task.settings import SettingArguments
from redrb.weights.inspection.listing import remove_weights
from tests.chaos import options

FLOW, STEPS, ROLLOUTS, HELD = "flow", "steps", "rollouts", "held"
"""`flow` for most makers and single trainers, `steps` for two ranks that take together, `rollouts`
for groups in parts and groups with rights, which a stage forwards to `flow`, `held` for consumers
with many leases and large ones."""

TASKS = (FLOW, STEPS, ROLLOUTS, HELD)

LEFT = {STEPS: options.WORLD_SIZE - 1}
"""Groups that may wait when all workers have ended."""

MOST_RIGHTS = 64
"""Groups of `rollouts` that are begun with rights and not forwarded yet, at most."""

_SETTINGS: dict[str, SettingArguments] = {
    FLOW: {"limit": 300, "max_dead": 0},
    STEPS: {"limit": 300},
    ROLLOUTS: {"limit": 100, "max_staleness": 0, "groups_per_version": MOST_RIGHTS},
    HELD: {"limit": 6000},
}
_MAX_DELIVERIES = 1_000
"""Workers die so often that the ordinary bound would fill the dead letters."""


def create(url: str) -> None:
    """Create all tasks; workers give no settings, which one of them changes."""
    with redrb.connect(url, retry_s=options.RETRY_S) as client:
        for task, settings in _SETTINGS.items():
            redrb.ExperienceStream(
                client,
                task,
                namespace=options.NAMESPACE,
                max_deliveries=_MAX_DELIVERIES,
                **settings,
            ).close()


def take_back_rights(url: str) -> None:
    """Ask for a right and return it: the task then takes back those of dead makers."""
    with (
        redrb.connect(url, retry_s=options.RETRY_S) as client,
        redrb.ExperienceStream(client, ROLLOUTS, namespace=options.NAMESPACE) as stream,
        suppress(AdmissionTimeout),
        stream.admit(timeout=0),
    ):
        pass


def clear(url: str) -> None:
    """Delete everything; the checker then looks for keys that are left."""
    with redrb.connect(url, retry_s=options.RETRY_S) as client:
        for task in TASKS:
            with redrb.ExperienceStream(client, task, namespace=options.NAMESPACE) as stream:
                stream.clear()
        remove_weights(client, options.WEIGHTS, namespace=options.NAMESPACE)
