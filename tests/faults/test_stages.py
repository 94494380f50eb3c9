"""A pipeline of stages and a trainer, each of which is killed at several moments of its work."""

import subprocess
import sys

import redrb
from redrb import ExperienceStream
from tests import warm
from tests.samples import numbered

GROUPS = 24


def test_every_group_is_trained_once_although_every_process_is_killed(real_url, namespace):
    with redrb.connect(real_url) as client:
        with ExperienceStream(client, "prompts", namespace=namespace) as prompts:
            prompts.put_many([[numbered(n), numbered(n)] for n in range(GROUPS)])
        archive = ExperienceStream(client, "ready", namespace=namespace, group="archive")
        archive.join_group()
        pipeline = warm.Popen(
            [sys.executable, "-m", "tests.faults.stage_workers", real_url, namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with pipeline:
            acked = 0
            for line in pipeline.stdout:
                acked = int(line)
                if acked >= GROUPS:
                    break
            pipeline.stdin.close()
        with ExperienceStream(client, "ready", namespace=namespace) as ready:
            ledger = ready.stats().ledger
        groups = archive.take(archive.count(), timeout=0).groups()
        archive.close()
        trained = [int(items[0].reward or 0) for items in groups]
        fields = {name for items in groups for name in items[0].tensors}
        assert sorted(trained) == list(range(GROUPS))
        assert fields == {"rollouts", "scored", "ready"}
        assert (ledger.put, ledger.acked, ledger.waiting, ledger.leased) == (GROUPS, GROUPS, 0, 0)
        for task in ("prompts", "rollouts", "scored"):
            with ExperienceStream(client, task, namespace=namespace) as stream:
                assert stream.stats().ledger.acked == GROUPS
                assert not stream.dead_letters()
