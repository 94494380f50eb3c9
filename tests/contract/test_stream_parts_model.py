"""A model of makers that put parts and die: every group is there once, with all parts that came."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import redrb
from redrb.stream.put.producer import Producer
from tests.audit import audit
from tests.parts_audit import audit_parts
from tests.samples import numbered, numbers

OF, LEAST = 3, 2
KEYS = st.sampled_from(["a", "b", "c", "d"])
INDICES = st.integers(0, OF - 1)


def die(*_: object) -> None:
    """Be killed before the group is put."""
    raise KeyboardInterrupt


class Parts(RuleBasedStateMachine):
    """Makers and the server; `waiting` and `ended` say what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.client = redrb.connect(f"fake://{uuid.uuid4().hex}")
        self.stream = redrb.ExperienceStream(self.client, "math")
        self.waiting: dict[str, set[int]] = {}
        self.ended: dict[str, tuple[int | None, list[int]]] = {}

    def put_part(self, key: str, index: int) -> int | None:
        return self.stream.put_part(key, numbered(index), index=index, of=OF, least=LEAST)

    @rule(key=KEYS, index=INDICES)
    def a_part_comes(self, key: str, index: int) -> None:
        found = self.put_part(key, index)
        if key not in self.ended and not self.came(key, index):
            assert found is None
            return
        if key not in self.ended:
            self.end(key, found)
        assert found == self.ended[key][0]

    @rule(key=KEYS, index=INDICES)
    def a_part_comes_and_its_maker_dies(self, key: str, index: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Producer, "put", die)
            if key in self.ended or not self.came(key, index):
                self.put_part(key, index)
            else:
                with pytest.raises(KeyboardInterrupt):
                    self.put_part(key, index)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        due = f"{self.stream._task.store.keys.prefix}part_due"
        self.client.execute("ZADD", due, "XX", 1, key)
        before = self.stream.stats().stored
        self.stream._parts.finish_due()
        if len(self.waiting[key]) >= LEAST:
            self.end(key, before + 1)  # nothing is taken, so ids count the groups
        else:
            self.end(key, None)

    def came(self, key: str, index: int) -> bool:
        """Note a part; returns whether all are there."""
        self.waiting.setdefault(key, set()).add(index)
        return len(self.waiting[key]) == OF

    def end(self, key: str, group: int | None) -> None:
        indices = sorted(self.waiting.pop(key))
        self.ended[key] = group, indices if group else []
        if group is not None:
            (found,) = self.stream.read([group])
            assert numbers(found.items) == indices

    @invariant()
    def everything_is_counted(self) -> None:
        audit_parts(self.stream)
        stats = self.stream.stats()
        groups = [group for group, _ in self.ended.values() if group is not None]
        assert len(set(groups)) == len(groups) == stats.stored
        if self.waiting or self.ended:
            assert stats.parts.balanced
            assert stats.parts.waiting == sum(map(len, self.waiting.values()))

    def teardown(self) -> None:
        audit(self.stream)
        self.stream.close()
        self.client.close()


TestParts = Parts.TestCase
TestParts.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
