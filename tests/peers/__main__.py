"""Runs tests of other projects, from checkouts of these, with redrb in the place of their store.

python -m tests.peers FOLDER [PYTHON]

FOLDER holds checkouts named TransferQueue, verl, RL (NeMo RL) and xtuner (InternLM/xtuner); those
that are missing are said. PYTHON has redrb's packages and the ones that these projects import:

    pip install ray omegaconf hydra-core codetiming cachetools fastapi torchdata
    pip install loguru mmengine cyclopts more-itertools imageio

Nothing of the projects is copied or changed. Exits with 1 if a test fails or a checkout is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.servers import Server, programs

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """A project: its folder, its tests, those that look into its own internals, and options."""

    folder: str
    tests: tuple[str, ...]
    apart: tuple[str, ...] = ()
    options: tuple[str, ...] = ("-p", "redrb_peers", "--noconftest")


XTUNER = ("-p", "peer_stand_ins", "-p", "redrb_xtuner", "--confcutdir=tests/rl")


PEERS = (
    Peer(
        "TransferQueue",
        ("tests/e2e/test_kv_interface_e2e.py",),
        # asks the controller for batches with a sampler, which redrb does not have
        ("test_kv_clear_does_not_leak_reused_index_across_partitions",),
    ),
    Peer(
        "verl",
        (
            "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py",
            "tests/trainer/ppo/v1/test_reissue_inflight_on_cpu.py",
            "tests/utils/test_transferqueue_utils_on_cpu.py",
        ),
    ),
    Peer("RL", ("tests/unit/data_plane/test_interface_contract.py",)),
    Peer("xtuner", (str(HERE / "xtuner_plug.py"),)),
    Peer(
        "xtuner",
        (
            "tests/rl/test_replay_buffer.py",
            "tests/rl/test_producer.py",
            "tests/rl/test_multi_task_agent_loop_manager.py",
            "tests/rl/test_rl_colocate_trainer.py",
            "tests/rl/test_rl_disaggregated_trainer.py",
        ),
        options=XTUNER,
    ),
    Peer(  # apart from the others, for which XTuner replaces its modules of training
        "xtuner",
        (
            "tests/rl/test_agent_loop_manager_checkpoint.py",
            "tests/rl/test_rl_trainer_checkpoint.py",
        ),
        options=XTUNER,
    ),
)


def run(peer: Peer, folder: Path, python: str, url: str) -> int:
    """Run the tests of one project; returns pytest's exit status."""
    checkout = folder / peer.folder
    if not checkout.is_dir():
        print(f"{checkout} is missing: make a checkout of the project there.")
        return 1
    root = str(HERE.parents[1])  # after the checkout, which has a package named tests, too
    paths = [str(checkout), str(HERE), root, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "REDRB_URL": url,
        "REDRB_NAMESPACE": uuid.uuid4().hex,
        "REDRB_TRANSFER_QUEUE": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    # XTuner's conftest looks at the words that are paths
    options = [*peer.options, "-p", "no:cacheprovider", "-q", "-ra", "-W", "ignore"]
    options += [f"--config-file={os.devnull}", f"--rootdir={checkout}"]
    if peer.apart:
        options += ["-k", " and ".join(f"not {name}" for name in peer.apart)]
    print(f"== {peer.folder}", flush=True)
    command = [python, "-m", "pytest", *options, *peer.tests]
    return subprocess.run(command, cwd=checkout, env=environment, check=False).returncode


def main() -> int:
    """Run all; returns the exit status."""
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    folder = Path(sys.argv[1]).resolve()
    python = sys.argv[2] if len(sys.argv) == 3 else sys.executable
    server = Server(next(iter(programs().values())))
    try:
        return max([run(peer, folder, python, server.url) for peer in PEERS])
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
