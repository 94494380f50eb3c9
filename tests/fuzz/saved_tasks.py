"""Files of saved tasks: every record is checked, or the file is refused.

The checksum at the end of a file is made to fit, since a hostile writer can do that as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash

import redrb
from redrb.errors import DecodeError
from redrb.stream.saving.checking import CheckedContents
from redrb.stream.saving.file import DIGEST_BYTES, SaveReader


def one_input(data: bytes) -> None:
    """Read one file as a resume does, twice: without payloads, then with them."""
    whole = data + xxhash.xxh3_128(data).digest()
    for payloads in (False, True):
        try:
            contents = CheckedContents("the file")
            for frame in SaveReader(io.BytesIO(whole), "the file").frames(payloads=payloads):
                contents.add(frame)
        except DecodeError:
            continue


def seeds() -> Iterator[bytes]:
    """Yield the files of two tasks, without their checksums."""
    item = redrb.BufferItem(
        sequences=torch.arange(5),
        action_log_probs=torch.zeros(2),
        values=torch.zeros(2),
        reward=torch.tensor(1.0),
        kl=torch.zeros(2),
        advantages=torch.ones(2),
        tags={"score": 0.5, "source": "math"},
    )
    with redrb.connect("fake://fuzz-saved") as client, TemporaryDirectory() as directory:
        for order in ("fifo", "prioritized"):
            stream = redrb.ExperienceStream(
                client, order, order=order, tags=["score", "source"], max_staleness=4
            )
            for number in range(4):
                stream.put([item], policy_version=number + 1)
            stream.take(1, timeout=0).ack()
            lease = stream.take(1, timeout=0)
            lease.reject("bad")
            path = Path(directory) / order
            stream.save(path)
            stream.close()
            yield path.read_bytes()[:-DIGEST_BYTES]
