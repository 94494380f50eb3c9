"""`python -m workers.trainer`: the command `redrb-trainer` in a checkout."""

from redrb.cli.processes.trainer import run

if __name__ == "__main__":
    run()
