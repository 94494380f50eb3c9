"""`python -m tests.chaos`: one run, its table, and its findings."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from tests.chaos.faults import KINDS
from tests.chaos.options import parse
from tests.chaos.report import lines
from tests.chaos.run import Run

_SHOWN = 40


def main(arguments: list[str]) -> int:
    chosen = parse(arguments, list(KINDS))
    if chosen.seed == 0:
        chosen = replace(chosen, seed=random.SystemRandom().randrange(1, 2**31))
    print(f"chaos: seed {chosen.seed}, {chosen.seconds:.0f} s", flush=True)
    run = Run(chosen)
    result = run.run()
    print("\n".join(lines(result)))
    if not result.findings:
        print(f"no findings, seed {chosen.seed}")
        if not chosen.keep:
            run.delete()
        return 0
    print(f"{len(result.findings)} findings, seed {chosen.seed}, journals in {run.directory}:")
    for finding in result.findings[:_SHOWN]:
        print(f"- {finding}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
