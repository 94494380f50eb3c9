"""Makers and trainers for tests of faults: `python -m tests.faults.stream_workers ROLE URL ...`.

A URL that ends with `#n` is that of a stream with n shards.

A maker prints the numbers of groups whose put returned; a trainer those that it acknowledged. Each
ends at end-of-file on its standard input.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import redrb
from redrb import BatchTimeout, LeaseLost
from tests.samples import numbered, numbers


def say(word: str, numbers_: list[int]) -> None:
    print(word, *numbers_, flush=True)


def make(stream: redrb.ExperienceStream | redrb.ShardedStream, first: int, count: int) -> None:
    for start in range(first, first + count, 4):
        own = list(range(start, min(start + 4, first + count)))
        stream.put_many([[numbered(n)] for n in own])
        say("put", own)


def train(stream: redrb.ExperienceStream | redrb.ShardedStream, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            lease = stream.take(8, timeout=0.3, at_least=1)
        except BatchTimeout:
            continue
        own = numbers(lease)
        say("took", own)
        try:
            lease.ack()
        except LeaseLost:
            say("lost", own)
        else:
            say("acked", own)


def train_once(stream: redrb.ExperienceStream) -> None:
    """Take a batch, wait for a line on standard input, acknowledge."""
    lease = stream.take(4)
    own = numbers(lease)
    say("took", own)
    sys.stdin.readline()
    try:
        lease.ack()
    except LeaseLost as error:
        say("lost", list(error.ids))
    else:
        say("acked", own)


def main() -> None:
    role, url, *arguments = sys.argv[1:]
    url, _, shards = url.partition("#")
    client = redrb.connect(url, retry_s=30)
    options: dict[str, Any] = {"limit": 64, "lease_ms": 1000, "max_deliveries": 100}
    stream: Any
    if shards:
        options["limit"] = 64 // int(shards)
        stream = redrb.ShardedStream(client, "math", shards=int(shards), **options)
    else:
        stream = redrb.ExperienceStream(client, "math", **options)
    say("ready", [])
    if role == "once":
        train_once(stream)
        return
    ended = threading.Event()
    if role == "maker":
        threading.Thread(target=make, args=(stream, *map(int, arguments)), daemon=True).start()
    else:
        threading.Thread(target=train, args=(stream, ended), daemon=True).start()
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
