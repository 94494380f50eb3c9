"""A process that dies while it resumes a task leaves the task as it was, and a file that works."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import redrb
from tests import warm
from tests.audit import audit
from tests.samples import numbered

RESUME = """
import sys, redrb
url, namespace, path = sys.argv[1:]
with redrb.connect(url) as client:
    print("begins", flush=True)
    redrb.ExperienceStream(client, "math", namespace=namespace).resume(path)
    print("done", flush=True)
"""
GROUPS = 6000


def test_a_resume_that_is_killed_at_any_time_changes_nothing(
    real_url: str, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "math.redrb"
    with redrb.connect(real_url) as client:
        source = redrb.ExperienceStream(
            client, "math", namespace=f"{namespace}-source", order="stalest"
        )
        for first in range(0, GROUPS, 1000):
            source.put_many(
                [[numbered(n % 100, policy_version=n)] for n in range(first, first + 1000)]
            )
        source.save(path)
        killed = 0
        for attempt in range(8):
            own = f"{namespace}-{attempt}"
            process = warm.Popen(
                [sys.executable, "-c", RESUME, real_url, own, path],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout.readline() == "begins\n"
            try:
                process.wait(0.02 + 0.03 * attempt)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            process.wait(20)
            whole = "done" in process.stdout.read()
            process.stdout.close()
            target = redrb.ExperienceStream(client, "math", namespace=own)
            found = len(target)
            assert found in ((GROUPS,) if whole else (0, GROUPS))
            killed += found == 0
            if found == 0:
                target.resume(path)
            audit(target)
            assert len(target) == GROUPS
            lease = target.take(3, timeout=5)
            assert lease.policy_versions == [0, 1, 2]
            lease.ack()
            target.close()
            target.clear()
        assert killed >= 2
        source.close()
        source.clear()


def test_the_files_of_killed_saves_are_deleted_and_others_stay(
    real_url: str, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "math.redrb"
    writing = """
import sys
from pathlib import Path
from redrb.stream.saving.saving import replaced
with replaced(Path(sys.argv[1])) as file:
    file.write(b"half")
    print("writes", flush=True)
    sys.stdin.read()
"""
    processes = [
        warm.Popen(
            [sys.executable, "-c", writing, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "writes\n"
    alive, *killed = processes
    for process in killed:
        process.kill()
        process.wait(20)
    own = tmp_path / ".math.redrb.notes"
    own.write_text("not of a save")
    with redrb.connect(real_url) as client:
        stream = redrb.ExperienceStream(client, "math", namespace=namespace)
        stream.put(numbered(1))
        stream.save(path)
        stream.close()
        stream.clear()
    assert len(list(tmp_path.iterdir())) == 3  # the save, `own`, and the file that is still written
    assert own.exists()
    alive.communicate("", timeout=20)
    assert path.read_bytes() == b"half"
    for process in killed:
        process.communicate(timeout=20)
    assert sorted(tmp_path.iterdir()) == sorted([own, path])
