"""`EncodedGroup`: a group as bytes, with what a put says of it; loads without torch."""

from __future__ import annotations

from typing import NamedTuple

from redrb.codec.wire import PREFIX
from redrb.experience.status import Status


class EncodedGroup(NamedTuple):
    """One group on its way to Redis.

    Attributes:
        blob: The bytes.
        samples: Samples in the group, >= 1.
        policy_version: The oldest of the samples' policy versions and of their token versions
            >= 0; None where there is none at all.
        status: The group's status, derived from its samples'.
        newest: The newest of all these versions; None where there is none at all.
        finite: False if its values were checked, and one is nan or infinite.
    """

    blob: bytes
    samples: int
    policy_version: int | None
    status: Status
    newest: int | None = None
    finite: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return len(self.blob)

    @property
    def kind(self) -> str:
        """Its fields and dtypes, masks left out, as a text; groups of different kinds are misfits.

        Ranks are not part of it: they are deeper in the blob.
        """
        from redrb.codec.misfits import kind_of  # it needs torch, and who resumes a task does not

        return kind_of(self.blob[PREFIX.size : PREFIX.size + PREFIX.unpack_from(self.blob)[3]])
