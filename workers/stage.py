"""`python -m workers.stage`: the command `redrb-stage` in a checkout."""

from redrb.cli.processes.stage import run

if __name__ == "__main__":
    run()
