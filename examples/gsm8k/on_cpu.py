"""Runs the example on a CPU: vLLM, a very small model, 200 generated problems, and a curve.

`make example VLLM=folder` calls it; the folder has bin/vllm and model. With --kills, vLLM, the
maker, the trainer and Redis are killed in the middle. OUT has curve.png and summary.json at the
end, and all that `redrb run` writes.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import redis

HERE = Path(__file__).parent
READY_S = 600.0
KILLED = ("vLLM", "maker", "trainer", "Redis")


class Server:
    """vLLM on a CPU."""

    def __init__(self, folder: Path, out: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [folder / "bin" / "vllm", "serve", folder / "model", "--dtype", "bfloat16"]
        self.command += ["--max-model-len", "256", "--enforce-eager", "--port", str(self.port)]
        self.command += ["--logprobs-mode", "processed_logprobs"]
        self.log = (out / "vllm.log").open("ab")

    def start(self):
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **settings},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def wait(self):
        ends = time.monotonic() + READY_S
        while self.process.poll() is None and time.monotonic() < ends:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                    return
            except OSError:
                threading.Event().wait(1.0)
        raise SystemExit(f"vLLM did not start: see {self.log.name}")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it has started
        self.process.wait()


def steps_of(out: Path, event: str = "step") -> list[dict]:
    """Return the trainer's events of a kind."""
    file = out / "trainer.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [each for each in events if each["event"] == event]


def kill(part: str, server: Server, out: Path):
    """Kill a part of the job; `redrb run` starts its own parts again, and this starts vLLM."""
    if part == "vLLM":
        server.kill()
        server.start()
    elif part == "Redis":
        with redis.Redis(unix_socket_path=str(out / "redis" / "redis.sock")) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
    else:
        name = {"maker": "maker-1"}.get(part, part)
        listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if f"--worker={name} " in f"{line} " and f"--checkpoints={out}/" in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)


def watch(job: subprocess.Popen, server: Server, out: Path, steps: int, kills: bool) -> dict:
    """Wait for the end of the job; kill a part whenever a fifth of the steps is done."""
    killed = {}
    while job.poll() is None:
        threading.Event().wait(1.0)
        done = max((each["step"] for each in steps_of(out)), default=0)
        if kills and len(killed) < len(KILLED) and done >= steps * (len(killed) + 1) // 5:
            part = KILLED[len(killed)]
            print(f"killed after step {done}: {part}", flush=True)
            kill(part, server, out)
            killed[part] = done
        if server.process.poll() is not None:
            raise SystemExit(f"vLLM has ended: see {server.log.name}")
    return killed


def draw(out: Path, killed: dict):
    """Draw the rewards of the samples of each step, and of the held-out problems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = {each["step"]: each["reward"] for each in steps_of(out)}
    held_out = {each["step"]: each["reward"] for each in steps_of(out, "evaluation")}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(trained.keys(), trained.values(), ".", color="0.7", label="samples of a step")
    means = [
        sum(near := [trained[each] for each in trained if abs(each - step) <= 3]) / len(near)
        for step in trained
    ]
    axes.plot(trained.keys(), means, color="C0", label="their mean over 7 steps")
    axes.plot(held_out.keys(), held_out.values(), "s-", color="C1", label="held-out problems")
    for part, step in killed.items():
        axes.axvline(step, color="C3", linewidth=0.8, linestyle=":")
        axes.text(step, 1.01, part, color="C3", ha="center", transform=axes.get_xaxis_transform())
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", type=Path, help="folder with bin/vllm and model")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k-cpu"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", action="store_true", help="kill each part once")
    options, further = parser.parse_known_args()  # further flags are those of `redrb run`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    out = options.out.resolve()
    out.mkdir(parents=True)
    problems = out / "problems.jsonl"
    subprocess.run(
        [sys.executable, HERE / "data.py", "--generated", "200", str(problems)], check=True
    )
    server = Server(options.vllm.resolve(), out)
    server.start()
    try:
        server.wait()
        print(f"vLLM serves at {server.url}", flush=True)
        model = options.vllm.resolve() / "model"
        command = [sys.executable, "-m", "redrb.cli", "run", str(HERE / "recipe.py")]
        command += ["--makers", "1", "--out", str(out), "--steps", str(options.steps)]
        command += ["--model-name", str(model), "--dataset", str(problems)]
        command += ["--engine-url", server.url, "--engine-folder", str(out / "weights")]
        command += ["--settings", str(HERE / "on_cpu.toml"), *further]
        with (out / "run.log").open("wb") as log:
            job = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                killed = watch(job, server, out, options.steps, options.kills)
            finally:
                job.terminate()
                job.wait()
    finally:
        server.kill()
    evaluations = steps_of(out, "evaluation")
    summary = {
        "status": job.returncode,
        "steps": max(each["step"] for each in steps_of(out)),
        "seconds": round(evaluations[-1]["time"] - evaluations[0]["time"]),
        "reward_before": evaluations[0]["reward"],
        "reward_after": evaluations[-1]["reward"],
        "killed": killed,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    print(json.dumps(summary))
    draw(out, killed)
    print(f"the curve is in {out / 'curve.png'}")
    sys.exit(job.returncode)


if __name__ == "__main__":
    main()
