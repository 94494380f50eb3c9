"""Names of weights, signals before the loops, and the demo's figures."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from redrb.cli.processes.lifetime import leaving_on_signals
from redrb.cli.run.history import JobEvents
from redrb.environment import child_environment
from redrb.errors import ConfigError
from redrb.recipe.job_settings import JobSettings


def test_weights_are_called_as_the_task_unless_they_are_named() -> None:
    plain, named = JobSettings(task="sort"), JobSettings(task="sort", weights="actor")
    assert (plain.weights_name, plain.reference_name) == ("sort", "sort-reference")
    assert (named.weights_name, named.reference_name) == ("actor", "actor-reference")
    with pytest.raises(ConfigError, match="--weights"):
        JobSettings(weights="a b")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_its_loop_a_process_ends_at_once_when_asked(number: signal.Signals) -> None:
    code = (
        "from redrb.cli.processes.lifetime import leaving_on_signals\n"
        "import threading\n"
        "with leaving_on_signals():\n"
        "    print('ready', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20) == 0


def test_a_rank_ends_before_python_stops_its_threads() -> None:
    code = (
        "import atexit, sys\n"
        "from redrb.cli.processes.lifetime import end\n"
        "atexit.register(print, 'the end of Python')\n"
        "print('done')\n"
        "end(3)\n"
    )
    for ranks, output in (("1", "done\nthe end of Python\n"), ("2", "done\n")):
        environment = child_environment(WORLD_SIZE=ranks)
        ended = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (3, output)


def test_signals_are_handled_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with leaving_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_shares_are_of_the_time_from_the_first_batch_on() -> None:
    history = JobEvents()
    assert (history.trainer_wait_share, history.share_of_makers(history.send_s)) == (0.0, 0.0)
    for seconds, waited in ((5.0, 4.0), (6.0, 0.25), (7.0, 0.25)):
        step = {"samples": 4, "weight_version": 1, "staleness_mean": 0.0, "staleness_max": 0}
        history.add({"event": "step", "seconds": seconds, "wait_for_batch_s": waited, **step})
    for _ in range(2):
        times = {"step_s": 1.0, "admission_s": 0.125, "send_s": 0.5, "backpressure_s": 0.25}
        history.add({"event": "put", **times})
    assert history.trainer_wait_share == 0.25
    assert history.share_of_makers(history.send_s) == 0.5
    assert history.share_of_makers(history.backpressure_s) == 0.25


@pytest.mark.parametrize("trainers", [1, 3])
def test_waits_that_were_open_at_the_end_count(trainers: int) -> None:
    history = JobEvents()
    for number in range(trainers):
        history.add({"event": "start", "step": 0, "weight_version": 1})
        history.add({"event": "step", "seconds": 9.0, "wait_for_batch_s": 8.0, "samples": 1})
        history.add({"event": "waited", "seconds": 184.0, "wait_for_batch_s": 175.0})
        assert history.trained_s == 184.0 * (number + 1)
        assert history.wait_for_batch_s == 175.0 * (number + 1)
    assert history.trainer_wait_share == pytest.approx(175 * trainers / (184 * trainers - 9))
    history.add({"event": "start", "step": 0, "weight_version": 1})
    history.add({"event": "waited", "seconds": 500.0, "wait_for_batch_s": 500.0})  # no makers yet
    assert history.wait_for_batch_s == 175.0 * trainers
    waits = {"send_s": 0.0, "backpressure_s": 0.0}
    history.add({"event": "put", "step_s": 10.0, "admission_s": 0.0, **waits})
    history.add({"event": "waited", "step_s": 30.0, "admission_s": 30.0, **waits})
    assert history.share_of_makers(history.admission_s) == 0.75
