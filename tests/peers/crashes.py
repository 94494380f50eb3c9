"""What crashes cost: verl's asynchronous replay buffer on redrb, or on TransferQueue.

python -m tests.peers.crashes FOLDER [--system redrb|transfer_queue] [--seconds 600]

FOLDER has a checkout of verl. Rollout workers put trajectories, their log-probs, and the tags that
verl uses. A trainer samples with verl's `ReplayBufferAsync`, checks rows, trains (it notes their
keys), clears them, and saves a checkpoint every few steps: its notes, and that of the queue. At
random moments one of them, all of them, or the server is killed with SIGKILL and started again. At
the end the trainer takes what is left, and its last notes are compared with the puts that returned:

- lost: trajectories whose put had returned, and that are neither trained nor there, and the seconds
  that their generation took. TransferQueue's actors belong to the trainer's job, and end with it;
- twice: trajectories that are trained twice in one history of checkpoints;
- torn: rows whose columns or tags did not agree.

It exits with 1 if redrb has lost, doubled or torn a row. With REDRB_TRANSFER_QUEUE_LATER=drop those
are lost that were put after the checkpoint to which the trainer returned.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SESSIONS = 4
"""Trajectories of a prompt."""

GENERATION_S = 0.4
BATCH, SAVE_EVERY = 4, 5
WORKERS = 3
MOST_FINISHED = 40
"""Finished prompts after which workers wait."""


def queue(system: str, *, driver: bool) -> Any:
    """Return the module `transfer_queue` of a system, after `init`."""
    if system == "redrb":
        from redrb.compat.transfer_queue import install

        install()
    import transfer_queue as tq

    if system == "transfer_queue":
        import ray

        where = {"num_cpus": 8} if driver else {"address": "auto"}
        ray.init(**where, namespace="crashes", log_to_driver=False)
    tq.init({} if driver and system == "redrb" else None)
    return tq


def note(path: Path, line: str) -> None:
    """Append a line that survives the process."""
    with path.open("a") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def worker(system: str, folder: Path, name: str) -> None:
    """Generate trajectories: put them, then their log-probs, then say that they are done."""
    import torch
    from tensordict import TensorDict

    tq = queue(system, driver=False)
    dice = random.Random(name)
    while not (folder / "over").exists():
        listed = tq.kv_list().get("train", {})
        done = [
            1 for tag in listed.values() if tag.get("is_prompt") and tag["status"] == "finished"
        ]
        if len(done) > MOST_FINISHED:
            time.sleep(0.2)
            continue
        uid, step = uuid.uuid4().hex, int((folder / "step").read_text())
        prompt = {"is_prompt": True, "status": "running", "global_steps": step}
        tq.kv_put(uid, "train", None, prompt)
        began = time.monotonic()
        time.sleep(dice.uniform(0.5, 1.5) * GENERATION_S)
        took = time.monotonic() - began
        keys = [f"{uid}_{session}_0" for session in range(SESSIONS)]
        lengths = [dice.randint(16, 64) for _ in keys]
        tokens = [torch.arange(size) + size for size in lengths]
        nested = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
        tags = [
            {"status": "finished", "seq_len": size, "global_steps": step, "min_global_steps": step}
            for size in lengths
        ]
        tq.kv_batch_put(keys, "train", TensorDict({"tokens": nested}, batch_size=[SESSIONS]), tags)
        log_probs = torch.nested.as_nested_tensor(
            [-each.float() for each in tokens], layout=torch.jagged
        )
        tq.kv_batch_put(keys, "train", TensorDict({"log_probs": log_probs}, batch_size=[SESSIONS]))
        tq.kv_put(uid, "train", None, prompt | {"status": "finished"})
        note(folder / f"put-{name}", f"{uid} {took:.3f}")


def trainer(system: str, folder: Path) -> None:
    """Train for ever, from the last checkpoint on; at the end, until nothing is left."""
    tq = queue(system, driver=True)
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    history: list[str] = []
    step = 0
    latest = folder / "latest"
    if latest.exists():
        checkpoint = folder / latest.read_text()
        history = json.loads((checkpoint / "trained.json").read_text())
        step = int(checkpoint.name.rpartition("-")[2])
        tq.load_checkpoint(checkpoint / "queue")
    (folder / "step").write_text(str(step))
    note(folder / "events", f"trainer from step {step}, {len(history)} trained")
    buffer = ReplayBufferAsync("separate_async", {}, 10**6, "drop", {}, poll_interval=0.1)

    def save() -> None:
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "trained.json").write_text(json.dumps(history))
        tq.save_checkpoint(checkpoint / "queue")
        staged = folder / "latest.new"
        staged.write_text(checkpoint.name)
        staged.replace(latest)

    if not history:
        save()  # before the first checkpoint a job starts from nothing, in any system
    while True:
        over = (folder / "all-put").exists()
        ready = buffer.get_sampleable_count(step, "train")
        if over and ready == 0:
            break
        if ready < BATCH and not over:  # `sample` would wait for a whole batch, which may not come
            time.sleep(0.1)
            continue
        meta, _ = buffer.sample(step, "train", min(BATCH, ready))
        data = tq.kv_batch_get(meta.keys, "train", ["tokens", "log_probs"])
        for key, tag, tokens, log_probs in zip(
            meta.keys, meta.tags, data["tokens"].unbind(), data["log_probs"].unbind(), strict=True
        ):
            size = tag["seq_len"]
            if len(tokens) != size or tokens[0] != size or not (tokens == -log_probs).all():
                note(folder / "torn", key)
        history += meta.keys
        tq.kv_clear(meta.keys, "train")
        step += 1
        (folder / "step").write_text(str(step))
        if step % SAVE_EVERY == 0:
            save()
    save()
    left = tq.kv_list().get("train", {})
    (folder / "left.json").write_text(json.dumps(sorted(left)))
    note(folder / "events", f"trainer done at step {step}, {len(history)} trained")


class Job:
    """The processes of a run."""

    def __init__(self, system: str, folder: Path, verl: Path) -> None:
        self.system, self.folder, self.verl = system, folder, verl
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.port = random.randint(20_000, 30_000)

    def start(self, name: str) -> None:
        """Start a process, or start it again."""
        if name == "server":
            from tests.servers import programs

            command = [next(iter(programs().values())), "--port", str(self.port)]
            command += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
            command += ["--appendfsync", "always"]
        else:
            command = [sys.executable, "-m", "tests.peers.crashes", str(self.verl.parent)]
            command += ["--system", self.system, "--role", name, "--at", str(self.folder)]
        paths = [str(self.verl), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "REDRB_URL": f"redis://127.0.0.1:{self.port}/0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        log = (self.folder / f"log-{name}").open("ab")
        self.running[name] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def kill(self, name: str) -> None:
        """End a process with SIGKILL, and what it has started."""
        process = self.running.pop(name)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def tend(self, names: Sequence[str]) -> None:
        """Start processes that have ended by themselves, as a cluster's supervisor does."""
        for name in names:
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                self.running.pop(name)
                self.start(name)


def run(system: str, verl: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Let a job run, kill what it consists of, and count what is lost."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="crashes-") as directory:
        folder = Path(directory)
        job = Job(system, folder, verl)
        workers = [f"worker-{number}" for number in range(WORKERS)]
        everything = ["server", "trainer", *workers]
        (folder / "step").write_text("0")
        kills: dict[str, int] = {}
        try:
            for name in everything[:2]:
                job.start(name)
                time.sleep(1.0 if name == "server" else 15.0)
            for name in workers:
                job.start(name)
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                time.sleep(dice.uniform(15.0, 45.0))
                victim = dice.choice(["trainer", "worker", "all", "server"])
                kills[victim] = kills.get(victim, 0) + 1
                names = {"all": everything, "worker": [dice.choice(workers)]}.get(victim, [victim])
                for name in names:
                    if name in job.running:
                        job.kill(name)
                for name in names:
                    job.start(name)
                    time.sleep(0.5)
                job.tend(everything)
            (folder / "over").touch()
            for name in workers:  # each ends after the prompt that it generates
                job.running[name].wait(60)
            (folder / "all-put").touch()
            deadline = time.monotonic() + 300
            while not (folder / "left.json").exists() and time.monotonic() < deadline:
                time.sleep(1.0)
                if job.running["trainer"].poll() not in (None, 0):
                    job.tend(["trainer"])
            if not (folder / "left.json").exists():
                logs = "\n".join(
                    f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
                    for path in folder.glob("log-*")
                )
                raise SystemExit(f"the trainer did not come to an end:\n{logs}")
            result = counted(folder)
        finally:
            for name in list(job.running):
                job.kill(name)
        return {"system": system, "kills": kills, **result}


def counted(folder: Path) -> dict[str, Any]:
    """Return what was put, trained and lost."""
    put: dict[str, float] = {}
    for path in folder.glob("put-*"):
        for line in path.read_text().splitlines():
            uid, took = line.split()
            put[uid] = float(took)
    latest = folder / (folder / "latest").read_text() / "trained.json"
    history: list[str] = json.loads(latest.read_text())
    left = json.loads((folder / "left.json").read_text())
    there = {*history, *left}
    wanted = {
        f"{uid}_{session}_0": took for uid, took in put.items() for session in range(SESSIONS)
    }
    lost = [key for key in wanted if key not in there]
    torn = folder / "torn"
    return {
        "put": len(wanted),
        "trained": len(history),
        "lost": len(lost),
        "lost_seconds": round(sum(wanted[key] for key in lost), 1),
        "twice": len(history) - len(set(history)),
        "torn": len(torn.read_text().splitlines()) if torn.exists() else 0,
        "starts_of_the_trainer": len((folder / "events").read_text().splitlines()),
    }


def main() -> int:
    """Run the job, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--system", choices=("redrb", "transfer_queue"), default="redrb")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "trainer":
        trainer(options.system, options.at)
        return 0
    if options.role:
        worker(options.system, options.at, options.role)
        return 0
    verl = options.checkouts.resolve() / "verl"
    result = run(options.system, verl, options.seconds, options.seed)
    print(json.dumps(result, indent=1))
    wrong = result["lost"] + result["twice"] + result["torn"]
    return 1 if options.system == "redrb" and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
