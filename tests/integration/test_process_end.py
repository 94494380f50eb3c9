"""A process that ends normally and leaves its streams open is no dead worker."""

from __future__ import annotations

import subprocess
import sys

import pytest

import redrb
from redrb.watch.state.findings import findings_of
from redrb.watch.state.model import State
from redrb.watch.state.reader import StateReader
from tests import warm
from tests.samples import numbered

BEGIN = """
import gc, multiprocessing, os, sys, redrb
from tests.samples import numbered
client = redrb.connect(sys.argv[1])
def opened():
    return redrb.ExperienceStream(client, "math", namespace=sys.argv[2], lease_ms=int(sys.argv[3]))
def work():
    announced()
    gc.collect()
def hold():
    global held
    held = announced()
def announced():
    stream = opened()
    stream.put(numbered(1))
    stream.worker.beat()
    return stream
"""

PUTS = "stream = announced()"
DROPS = "work()"
TAKES = "stream = opened(); lease = stream.take(1, timeout=30); stream.worker.beat()"
FORKS = "multiprocessing.set_start_method('fork')\nchild = multiprocessing.Process(target=hold)\n"
SPAWNED = "child.start(); child.join(); sys.exit(child.exitcode)"
COPIES = """
stream = announced()
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print(redrb.watch.state.reader.StateReader(client, sys.argv[2]).look().tasks[0].workers[0].life)
"""


@pytest.fixture
def run(real_url, namespace):
    def run(program, lease_ms=600_000):
        start = subprocess.run if program == FORKS + SPAWNED else warm.run  # redrb is not loaded
        return start(
            [sys.executable, "-c", BEGIN + program, real_url, namespace, str(lease_ms)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def owner(real_url):
    return redrb.connect(real_url)


def lives(state: State) -> list[str]:
    return [worker.life for worker in state.tasks[0].workers]


@pytest.mark.parametrize(
    "program",
    [PUTS, DROPS, FORKS + SPAWNED, f"redrb.ExperienceStream\n{FORKS}{SPAWNED}"],
    ids=["open", "dropped", "child", "child of a process that has loaded it"],
)
def test_a_program_without_close_has_ended(run, owner, namespace, program):
    ended = run(program)
    assert ended.returncode == 0, ended.stderr
    state = StateReader(owner, namespace).look()
    assert lives(state) == ["ended"]
    assert state.tasks[0].main.stats.ledger.put == 1
    assert not [each for each in findings_of(state) if each.code == "dead-worker"]


def test_a_forked_child_that_ends_ends_no_worker_of_its_parent(run):
    ended = run("import redrb.watch.state.reader\n" + COPIES)
    assert (ended.returncode, ended.stdout) == (0, "live\n"), ended.stderr


@pytest.mark.parametrize(
    ("ending", "leased"),
    [
        ("", 0),
        ("sys.exit(3)", 0),
        ("1 / 0", 1),
        ("client.close()", 0),
        ("with client: 1 / 0", 1),
    ],
)
def test_leases_of_a_program_that_ends_are_requeued_unless_it_failed(
    run, owner, namespace, ending, leased
):
    with redrb.ExperienceStream(owner, "math", namespace=namespace) as stream:
        stream.put(numbered(1))
        ended = run(f"{TAKES}\n{ending}")
        assert ("ZeroDivisionError" in ended.stderr) == bool(leased)
        state = StateReader(owner, namespace).look()
        assert lives(state).count("ended") == 1
        ledger = stream.stats().ledger
        assert (ledger.leased, ledger.waiting) == (leased, 1 - leased)


def test_the_groups_of_a_program_that_failed_count_a_failed_delivery(run, owner, namespace):
    stream = redrb.ExperienceStream(owner, "math", namespace=namespace, max_deliveries=1)
    with stream:
        stream.put(numbered(1))
        run(f"{TAKES}\n1 / 0", lease_ms=300)
        with pytest.raises(redrb.BatchTimeout):
            stream.take(1, timeout=3)
        (letter,) = stream.dead_letters()
    assert letter.id is not None
