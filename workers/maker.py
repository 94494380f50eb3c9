"""`python -m workers.maker`: the command `redrb-maker` in a checkout."""

from redrb.workers.maker import run

if __name__ == "__main__":
    run()
