"""A job of slime whose trainer and makers are killed at several moments, and whose Redis is too."""

import json
import subprocess
import sys

import redrb
from redrb import ExperienceStream
from redrb.errors import BatchTimeout
from tests import warm
from tests.faults.slime_workers import BATCH, ROLLOUTS, SAVE_EVERY


def stored(client, namespace, task):
    """Take everything that is stored in a task; returns ids and groups."""
    with ExperienceStream(client, task, namespace=namespace, checks=()) as stream:
        found = {}
        while stream.stats().stored > len(found):
            try:
                lease = stream.take(20, at_least=1, timeout=1)
            except BatchTimeout:  # leases of killed processes, which end in a moment
                continue
            found |= dict(zip(lease.ids, lease.groups(), strict=True))
        assert stream.stats().ledger.balanced
        assert not stream.dead_letters()
        stream.dismiss(stream.consumer)
        return found, stream.stats().ledger.put


def mark(group):
    (column,) = (tensor for name, tensor in group[0].tensors.items() if name.startswith("tokens"))
    return int(column[0])


def test_each_group_is_trained_once_in_a_history_although_all_are_killed(
    own_server, namespace, tmp_path
):
    server = own_server("--appendonly", "yes", "--appendfsync", "always")
    job = warm.Popen(
        [sys.executable, "-m", "tests.faults.slime_workers", server.url, namespace, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        for saves, _ in enumerate(job.stdout):
            if saves in (1, 6):
                server.kill()
                server.start()
        errors = job.stderr.read()
    assert job.wait() == 0, errors
    trained = json.loads((tmp_path / f"model-{ROLLOUTS - 1}.json").read_text())
    with redrb.connect(server.url) as client:
        waiting, _ = stored(client, namespace, "math")
        begun, prompts = stored(client, namespace, "math.prompts")
        there = [mark(group) for group in waiting.values()]
        unfinished = [group[0].extras["place"] for group in begun.values()]
    assert len(trained) == len(set(trained)) == ROLLOUTS * BATCH
    assert len(there) == len(set(there))
    held = {*there} & {*trained}  # with redrb_keep_checkpoints=1 until the next save
    assert held <= {*trained[-SAVE_EVERY * BATCH :]}
    journals = [path.read_text().split() for path in tmp_path.glob("journal-*")]
    put = {int(number) for journal in journals for number in journal}
    assert put <= {*trained, *there}
    of_data_set = [number for number in {*trained, *there} if number < 2**20]
    assert {*of_data_set, *unfinished} == set(range(prompts))
    assert 0 < len(of_data_set) < len({*trained, *there})
