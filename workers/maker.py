"""`python -m workers.maker`: the command `redrb-maker` in a checkout."""

from redrb.cli.processes.maker import run

if __name__ == "__main__":
    run()
