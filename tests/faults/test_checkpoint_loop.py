"""The loop of docs/explanation/exactly-once.md, killed between checkpoint and acknowledgement."""

import re
import signal
import sys
from pathlib import Path

import pytest

import redrb
from tests import warm
from tests.servers import programs

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "exactly-once.md"


@pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)
def test_each_group_is_trained_once_by_a_loop_that_names_its_groups(own_server, tmp_path):
    url = own_server().url
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace('"embedded://"', repr(url))
    made, puts, rest = re.split(r"(for reward in .*?\n(?=\w))", program, flags=re.DOTALL)
    assert "        lease.ack()\n" in rest
    killed = rest.replace("        lease.ack()\n", "        os.kill(os.getpid(), 9)\n")
    resumed = rest[: rest.index("first, second")] + 'print(resume("checkpoint.pt"))\n'
    ends = []
    for each in (made + puts + killed, made + resumed):
        command = [sys.executable, "-c", each]
        ends.append(
            warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        )
    assert [end.returncode for end in ends] == [-signal.SIGKILL, 0], ends
    assert ends[1].stdout == "2\n"
    with redrb.connect(url) as client, redrb.ExperienceStream(client, "math") as stream:
        assert stream.stats().ledger == redrb.Ledger(put=3, acked=2, waiting=1)
        with stream.take(1, timeout=60) as lease:
            assert lease.batch().reward.tolist() == [0.5]
