"""Fuzz one reader of foreign input with atheris (`pip install atheris`).

    make fuzz MINUTES=10                                        # all targets
    python -m tests.fuzz TARGET DIRECTORY -max_total_time=600   # one of them

New inputs are kept in DIRECTORY, which begins with the seeds and the corpus of the project. An
input that shows a defect is written to the working directory. `python -m tests.fuzz` names the
targets.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["redrb"]):
    from tests.fuzz.targets import TARGETS, inputs


def main() -> None:
    """Fuzz until the time is over."""
    if len(sys.argv) < 3 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
    _, name, directory, *options = sys.argv
    found = Path(directory)
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs(name)):
        (found / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], directory, *options], TARGETS[name].one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
