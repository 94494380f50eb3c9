"""Writes the data set of the example: GSM8K of Hugging Face, or generated word problems.

`python data.py gsm8k.jsonl` needs a network and the package datasets. `python data.py
--generated 200 problems.jsonl` needs neither, and makes sums that a very small model can learn.
"""

import argparse
import json
import random
from pathlib import Path

from redrb.recipe import data_rows

NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pens", "eggs", "cups")


def generated(count: int) -> list[dict[str, str]]:
    """Return word problems in the form of GSM8K, no two of them alike."""
    numbers = random.Random(0)
    problems = [
        {
            "question": f"{name} has {a} {thing} and gets {b}. How many {thing}?",
            "answer": f"{a}+{b}={a + b}\n#### {a + b}",
        }
        for name in NAMES
        for thing in THINGS
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    return numbers.sample(problems, count)


def gsm8k() -> list[dict[str, str]]:
    """Return the training problems of GSM8K, then those of its test, which are held out."""
    both = [data_rows("openai/gsm8k:main", split) for split in ("train", "test[:200]")]
    return [{key: row[key] for key in ("question", "answer")} for rows in both for row in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file of JSON lines to write")
    parser.add_argument("--generated", type=int, default=0, help="number of generated problems")
    options = parser.parse_args()
    rows = generated(options.generated) if options.generated else gsm8k()
    options.file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{options.file}: {len(rows)} problems")
