"""Bad groups are refused at put, with the place of the fault, and never take others with them."""

import math

import pytest
import torch

from redrb import ExperienceStream, make_experience_batch
from redrb.errors import ConfigError, RecordError, RedrbError, SendFailed
from redrb.stream.put.refusals import CHECKS
from redrb.stream.sending import ExperienceSender
from tests.audit import audit
from tests.samples import numbered, numbers

NAN = torch.tensor([0.0, math.nan])
LESS = {"advantages": None}
NARROW = {"advantages": torch.tensor(1.0).half()}


@pytest.fixture
def opened(client, namespace):
    def open_stream(**options):
        chosen = {"checks": CHECKS, **options}
        stream = ExperienceStream(client, "math", namespace=namespace, **chosen)
        stream.join_group()
        return stream

    return open_stream


@pytest.mark.parametrize(
    ("changes", "settings", "field", "position"),
    [
        ({"advantages": NAN}, {}, "advantages", 1),
        ({"values": torch.tensor(math.inf)}, {}, "values", None),
        ({"action_log_probs": -NAN}, {}, "action_log_probs", 1),
        (LESS, {}, "advantages", None),
        (NARROW, {}, "advantages", None),
        ({"tensors": {"x": NAN}}, {}, "x", None),
        ({"policy_version": None}, {"max_staleness": 4}, "policy_version", None),
    ],
)
def test_the_error_names_group_sample_field_and_position(
    opened, changes, settings, field, position
):
    def sample(number, **own):
        return numbered(number, **{"policy_version": 1, **own})

    with opened(**settings) as stream:
        groups = [[sample(0), sample(1)], [sample(2), sample(3, **changes)], [sample(4), sample(5)]]
        with pytest.raises(RecordError, match=r"sample 1.*group 1") as caught:
            stream.put_many(groups)
        error = caught.value
        assert (error.group, error.sample, error.field) == (1, 1, field)
        assert (error.position, error.bad_groups) == (position, (1,))
        assert stream.stats().ledger.put == 0
    with opened(on_bad_group="drop") as stream:
        ids = stream.put_many(groups)
        assert len(ids) == 2
        ledger = stream.stats().ledger
        assert (ledger.put, ledger.filtered, ledger.waiting) == (3, 1, 2)
        assert numbers(stream.take(2, timeout=0)) == [0, 1, 4, 5]
    with opened(checks=[]) as stream:
        if field != "advantages" or changes is not NARROW:
            assert len(stream.put_many(groups)) == 3
        audit(stream)


def test_masked_positions_may_hold_anything(opened):
    masked = {"action_log_probs": -torch.tensor([0.5, math.inf]), "advantages": NAN}
    mask = torch.tensor([True, False])
    with opened() as stream:
        stream.put([numbered(0, action_mask=mask, **masked)])
        batch = make_experience_batch([numbered(1, action_mask=mask, **masked)])
        stream.put(batch)
        with pytest.raises(RecordError, match="position 1"):
            stream.put([numbered(2, action_mask=~mask, **masked)])
        batch.action_mask = ~mask[None]
        with pytest.raises(RecordError, match=r"row 0 is -inf at position 1"):
            stream.put(batch)


def test_all_bad_groups_of_a_put_are_named(opened):
    groups = [[numbered(n, advantages=NAN)] if n % 2 else [numbered(n)] for n in range(5)]
    with opened() as stream, pytest.raises(RecordError, match="group 1") as caught:
        stream.put_many(groups)
    assert caught.value.bad_groups == (1, 3)
    assert "group 3" in caught.value.__notes__[0]
    rows = make_experience_batch([group[0] for group in groups[1::2]])
    with opened(on_bad_group="drop") as stream:
        assert stream.put(rows) == ()
        assert stream.stats().ledger.filtered == 2


@pytest.mark.parametrize("changes", [LESS, NARROW, {"tensors": {"x": NAN}}])
def test_a_task_remembers_the_fields_of_its_first_put(opened, changes):
    """Each stream stands for a process; the second one had opened the task before the first put."""
    with opened() as first, opened() as early, opened(on_bad_group="drop") as dropping:
        first.put(numbered(0))
        with opened() as late:
            for stream in (first, early, early, late):
                with pytest.raises(RecordError, match="other groups of the task"):
                    stream.put(numbered(1, **changes))
        assert dropping.put_many([[numbered(2, **changes)], [numbered(3, **changes)]]) == ()
        assert len(dropping.put_many([[numbered(4, **changes)], [numbered(5)]])) == 1
        assert first.put(numbered(6, **changes), status="aborted")
        ledger = first.stats().ledger
        assert (ledger.filtered, ledger.put, ledger.waiting) == (3, 6, 3)
        audit(first)
        first.clear()
        assert early.put(numbered(7, **changes))
        with pytest.raises(RecordError, match="other groups of the task"):
            first.put(numbered(8))


@pytest.mark.parametrize(
    ("batch", "settings"),
    [
        ({"advantages": torch.tensor([1.0, math.nan])}, {}),
        ({"reward": torch.tensor([1.0, math.inf])}, {"filters": [lambda _: True]}),
        ({"policy_version": [1, None]}, {"max_staleness": 4}),
        ({"policy_version": [1, None]}, {"max_staleness": 4, "filters": [lambda _: True]}),
        ({"sequences": torch.ones(2, 3, dtype=torch.int32)}, {}),
    ],
)
def test_the_row_of_an_experience_is_named(opened, batch, settings):
    rows = make_experience_batch([numbered(n, policy_version=1) for n in range(2)])
    with opened(**settings) as stream:
        stream.put(rows)
        for name, value in batch.items():
            setattr(rows, name, value)
        with pytest.raises(RedrbError, match=r"\brow 1\b") as caught:
            stream.put(rows)
        told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
        assert not any("group 1" in text or "sample 0" in text for text in told)
        assert caught.value.bad_groups[-1] == 1


def test_the_checks_are_on_and_say_what_to_do(client, namespace):
    """The fields of a task are known to each process and after a deletion of the task, too."""
    early, late = (
        ExperienceStream(client, "math", namespace=namespace, max_staleness=4) for _ in range(2)
    )
    with early, late:
        early.put(numbered(0, **LESS), policy_version=1)
        for stream in (early, late):
            with pytest.raises(RecordError, match=r"use another task, or clear\(\) this one"):
                stream.put(numbered(1), policy_version=1)
            with pytest.raises(RecordError, match=r"give put\(policy_version=\)"):
                stream.put(numbered(1, **LESS))
        late.clear()
        early.put(numbered(2), policy_version=1)
        late.put(numbered(3), policy_version=1)
        with pytest.raises(RecordError, match="is missing, and is a tensor in other groups"):
            late.put(numbered(4, **LESS), policy_version=1)
        audit(late)


def test_a_sender_puts_the_other_groups_of_its_batch(opened):
    batch = make_experience_batch([numbered(n, advantages=torch.zeros(2)) for n in range(3)])
    batch.advantages[1, 1] = math.nan
    with opened() as stream, ExperienceSender(stream) as sender:
        sender.send(batch)
        with pytest.raises(SendFailed, match="row 1 is nan at position 1") as caught:
            sender.flush(timeout=10)
        assert caught.value.dropped == 1
        assert numbers(stream.take(2, timeout=0)) == [0, 2]


def test_a_writer_puts_nothing_of_a_call_that_is_refused(opened):
    with opened() as stream, stream.writer() as writer:
        writer.put(numbered(0))
        with pytest.raises(RedrbError, match="nan"):
            writer.put_many([[numbered(1)], [numbered(2, advantages=NAN)]])
        writer.put(numbered(3))
        writer.flush()
        assert numbers(stream.take(2, timeout=0)) == [0, 3]


@pytest.mark.parametrize("checks", ["values", ["speed"], 7, [None]])
def test_unknown_checks_are_refused(opened, checks):
    with pytest.raises(ConfigError, match="checks="):
        opened(checks=checks)
    with pytest.raises(ConfigError, match="on_bad_group"):
        opened(on_bad_group="keep")


def test_a_bound_of_staleness_that_another_process_adds_holds_for_the_first_put_after_it(opened):
    groups = [[numbered(1, policy_version=2)], [numbered(2)], [numbered(3, policy_version=2)]]
    with opened() as raising, opened(on_bad_group="drop") as dropping:
        raising.put(numbered(0))
        dropping.put(numbered(0))
        with opened(max_staleness=4):
            with pytest.raises(RecordError, match=r"sample 0 of group 1 has no policy_version"):
                raising.put_many(groups)
            ids = dropping.put_many(groups)
        assert len(ids) == 2
        ledger = raising.stats().ledger
        assert (ledger.put, ledger.filtered, ledger.waiting) == (5, 1, 4)
        assert numbers(raising.take(4, timeout=0)) == [0, 0, 1, 3]
        audit(raising)
