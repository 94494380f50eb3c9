"""slime on streams: what is handed out, taken, acknowledged at a checkpoint, and resumed.

slime itself is a stand-in here; `tests/peers/test_slime.py` runs slime's own code.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from redrb import BufferItem
from redrb.compat.sample_groups import generation, job
from redrb.compat.slime import RedrbDataSource, generate_rollout, put_groups
from redrb.errors import BatchTimeout, ConfigError, DecodeError, StoreError
from redrb.stream import Lease
from tests.framework_stand_ins import RolloutFnTrainOutput, Sample, arguments, stand_ins

COMPLETED, ABORTED = Sample.Status.COMPLETED, Sample.Status.ABORTED


@pytest.fixture(autouse=True)
def slime(monkeypatch):
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def args(url, namespace, tmp_path):
    return arguments(url, namespace, tmp_path, prompts=4)


@pytest.fixture
def start(args):
    """Start a trainer: a data source that has nothing of those before, which stay as they were."""
    sources = []

    def start_one(rollout_id=-1, **changes):
        job._jobs.clear()
        vars(args).update(changes)
        sources.append(RedrbDataSource(args))
        if rollout_id is not None:
            sources[-1].load(rollout_id)
        return sources[-1]

    yield start_one
    for source in sources[-1:]:  # the others may be closed
        for stream in (
            source.groups.finished,
            source.groups.generation.prompts,
            source.groups.generation.returned,
        ):
            assert stream.stats().ledger.balanced
    for source in sources:
        source.close()
    assert not job._jobs


def finish(group, mark=0):
    for sample in group:
        sample.tokens, sample.response_length, sample.reward = [1, 2, mark], 1, float(mark)
        sample.rollout_log_probs, sample.status = [-0.5], COMPLETED
    return group


def make(mark):
    """Return a finished group of a maker that has no data source."""
    return finish([Sample(), Sample()], mark)


def marks(output):
    return [group[0].tokens[-1] for group in output.samples]


def ledger(stream):
    stats = stream.stats().ledger
    return stats.waiting, stats.leased, stats.acked


# the data source


def test_prompts_come_in_the_order_of_the_data_set_over_epochs(start):
    source = start()
    groups = source.get_samples(3) + source.get_samples(3)
    assert [group[0].prompt for group in groups] == ["p0", "p1", "p2", "p3", "p3", "p2"]
    assert [sample.index for group in groups for sample in group] == list(range(12))
    assert [group[0].group_index for group in groups] == list(range(6))
    assert len(source) == 4
    assert source.dataset[0] == "p0"


def test_processes_share_one_pass_and_what_a_dead_one_had_comes_again(start):
    first, second = start(), start(None)
    had = [first.get_samples(1)[0], second.get_samples(2)[1], first.get_samples(1)[0]]
    assert [group[0].prompt for group in had] == ["p0", "p2", "p3"]
    first.close()  # as its lease ends when it is killed
    assert [group[0].prompt for group in second.get_samples(3)] == ["p0", "p3", "p3"]


@pytest.mark.parametrize("makers", [1, 3])
def test_no_prompt_is_left_out_when_puts_fail(start, client, makers):
    """Puts that fail, as the first ones after a restart of Redis do, take ids of the stream."""
    sources = [start() for _ in range(makers)]
    drawn = []
    for count in (1, 2, 40, 1, 201, 1):  # 32 groups a request, 200 records are removed a put
        for source in sources:
            client.execute("SCRIPT", "FLUSH")
            drawn += [group[0].group_index for group in source.get_samples(count)]
    assert sorted(drawn) == list(range(246 * makers))
    assert list(map(ledger, [sources[0].groups.generation.prompts])) == [(0, 246 * makers, 0)]


def test_makers_that_draw_at_the_same_time_draw_each_prompt_once(start):
    sources = [start() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(lambda s=s: [s.get_samples(n) for n in (5, 1, 33)]) for s in sources]
        drawn = [group[0].group_index for each in work for call in each.result() for group in call]
    assert sorted(drawn) == list(range(39 * 4))


@pytest.mark.parametrize("place", [None, -1, "1", True, [1]])
def test_an_entry_that_names_no_place_is_refused(start, place):
    source = start()
    source.groups.generation.prompts.put([BufferItem(None, None, extras={"place": place})])
    with pytest.raises(StoreError, match="place of a prompt"):
        source.get_samples(1)


def test_aborted_groups_come_back_first_with_what_was_generated(start):
    source = start()
    first, second = source.get_samples(2)
    second[0].tokens, second[0].status = [7], ABORTED
    source.add_samples([second])
    assert source.get_buffer_length() == 1
    again = source.get_samples(2)
    assert again[0] == second
    assert again[1][0].prompt == "p2"
    again[0][1].tokens = [8]
    source.add_samples(again[:1])
    assert source.get_samples(1)[0][1].tokens == [8]
    source.put([finish(again[0]), finish(first)])
    assert ledger(source.groups.generation.prompts) == (0, 1, 2)
    assert ledger(source.groups.generation.returned) == (0, 0, 2)


@pytest.mark.parametrize("step", ["release", "acknowledge"])
def test_a_group_whose_process_dies_while_it_gives_it_back_is_there_once(start, monkeypatch, step):
    source = start()
    for mark in (1, 2):
        (group,) = source.get_samples(1)
        group[0].tokens = [mark]
        with monkeypatch.context() as patch:
            if mark == 2:  # killed before its entry is released, or its first content is ended
                patch.setattr(generation, step, die)
                with pytest.raises(KeyboardInterrupt):
                    source.add_samples([group])
            else:
                source.add_samples([group])
    source.close()
    successor = start()
    had = successor.get_samples(2)
    assert [each[0].prompt for each in had] == ["p0", "p1"]
    assert had[0][0].tokens == [2]
    successor.put(list(map(finish, had)))
    assert ledger(successor.groups.finished) == (2, 0, 0)
    assert ledger(successor.groups.generation.prompts)[:2] == (0, 0)
    assert ledger(successor.groups.generation.returned)[:2] == (0, 0)


def test_what_was_generated_of_a_finished_group_is_deleted_at_the_next_start(start, monkeypatch):
    source = start()
    (group,) = source.get_samples(1)
    source.add_samples([group])
    (group,) = source.get_samples(1)
    with monkeypatch.context() as patch:
        patch.setattr(generation, "acknowledge", die)
        with pytest.raises(KeyboardInterrupt):
            source.put([finish(group)])
    source.close()
    other = start(None)
    (kept,) = other.get_samples(1)
    other.add_samples([kept])
    assert other.get_buffer_length() == 2
    other.load(-1)
    assert other.get_buffer_length() == 1
    assert other.get_samples(1) == [kept]


def die(*_):
    raise KeyboardInterrupt


def test_groups_that_are_not_of_the_data_set_are_returned_too(start):
    source = start()
    source.add_samples([[Sample(prompt="mine"), Sample(prompt="mine")]])
    (group,) = source.get_samples(1)
    assert group[0].prompt == "mine"
    source.put([finish(group)])
    assert ledger(source.groups.generation.returned) == (0, 0, 1)


def test_groups_that_a_filter_dropped_are_done_at_the_second_save(start):
    source = start()
    kept, dropped, _ = source.get_samples(3)
    source.put([finish(kept)])
    source.drop([dropped])
    source.save(0)
    assert ledger(source.groups.generation.prompts) == (0, 1, 2)
    source.save(1)
    assert ledger(source.groups.generation.prompts) == (0, 0, 3)
    assert source.groups.finished.stats().ledger.filtered == 1


def test_without_the_rollout_function_a_save_ends_what_was_handed_out(start):
    source = start()
    source.get_samples(2)
    source.save(0)
    assert ledger(source.groups.generation.prompts) == (0, 0, 2)


# finished groups


def test_a_rollout_has_the_groups_of_the_makers_in_their_order(args, start):
    source = start()
    put_groups([make(1), make(2)], args=args)
    put_groups([[sample.to_dict() for sample in make(3)]], args=args)
    output = generate_rollout(args, 0, source)
    assert isinstance(output, RolloutFnTrainOutput)
    assert marks(output) == [1, 2]
    assert output.metrics == {"rollout/redrb/waiting_groups": 1}
    assert output.samples[0][0].rollout_log_probs == [-0.5]


def test_makers_that_count_alike_get_numbers_of_their_own(args, start):
    source = start()
    for mark in (1, 2):  # each has a trajectory of two samples
        inner = [Sample(0, 0, rollout_id=5), Sample(0, 1, rollout_id=5)]
        put_groups([[finish(inner, mark), Sample(0, 2)]], args=args)
    groups = generate_rollout(args, 0, source).samples
    indices = [trajectory.index for _, trajectory in groups]
    shared = [{(sample.index, sample.rollout_id) for sample in group[0]} for group in groups]
    assert len({*indices, *(index for index, _ in shared[0] | shared[1])}) == 4
    assert all(len(each) == 1 and min(each)[0] == min(each)[1] for each in shared)
    assert min(indices) > 2**40


def test_a_group_of_the_data_set_moves_to_the_finished_ones_once(start, monkeypatch):
    source = start()
    groups = source.get_samples(3)
    original = Lease._end_parts
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_end_parts", die)
        with pytest.raises(KeyboardInterrupt):
            source.put([finish(groups[0], 1)])  # it is stored, and not acknowledged
    assert Lease._end_parts is original
    source.close()
    successor = start(None)
    again = successor.get_samples(1)
    assert again[0][0].prompt == "p0"
    successor.put([finish(again[0], 2)])
    assert ledger(successor.groups.finished) == (1, 0, 0)
    assert ledger(successor.groups.generation.prompts) == (2, 0, 1)


def test_groups_of_another_size_and_foreign_ones_become_dead_letters(args, start):
    source = start()
    put_groups([make(1), make(2)[:1], make(3)], args=args)
    source.groups.finished.put(BufferItem(None, None, extras={"format": 1}))
    assert marks(generate_rollout(args, 0, source)) == [1, 3]
    put_groups([make(4), make(5)], args=args)
    assert marks(generate_rollout(args, 1, source)) == [4, 5]
    letters = source.groups.finished.dead_letters()
    assert [letter.message.partition(":")[0] for letter in letters] == [
        "it holds no samples in format 1",
        "a group of 1 trajectories for n_samples_per_prompt=2",
    ]


def test_too_few_groups_in_time_leave_those_that_came(args, start):
    source = start(redrb_timeout=0)
    put_groups([make(1), make(2)[:1]], args=args)
    with pytest.raises(BatchTimeout, match="task 'math'"):
        generate_rollout(args, 0, source)
    assert ledger(source.groups.finished)[:2] == (1, 0)


def test_settings_come_from_the_environment(url, namespace, args, start, monkeypatch):
    source = start()
    for name, value in (("URL", url), ("NAMESPACE", namespace), ("TASK", "math")):
        monkeypatch.setenv(f"REDRB_{name}", value)
    put_groups([make(1)])
    assert source.groups.finished.count() == 1
    other = start(None, redrb_task="code", redrb_stream={"limit": 7, "lease_ms": 900})
    assert other.groups.finished.settings().values["limit"] == "7"
    assert other.groups.generation.prompts.task == "code.prompts"


@pytest.mark.parametrize("source", [None, SimpleNamespace()])
def test_another_data_source_is_refused(args, source):
    with pytest.raises(ConfigError, match="--data-source-path"):
        generate_rollout(args, 0, source)


def test_a_buffer_filter_is_refused(args):
    args.buffer_filter_path = "a.b"
    with pytest.raises(ConfigError, match="--buffer-filter-path"):
        RedrbDataSource(args)


# groups that the trainer's process makes


class Local:
    """A rollout function of slime: three groups a call, of which it gives the last one back."""

    calls = 0

    def __call__(self, args, rollout_id, data_source, evaluation=False):
        if evaluation:
            return "evaluated"
        self.calls += 1
        groups = data_source.get_samples(4)
        data_source.add_samples(groups[3:])
        done = [finish(group, group[0].group_index) for group in groups[:3]]
        return RolloutFnTrainOutput(done, {"calls": self.calls})


@pytest.fixture
def local(args, monkeypatch):
    function = Local()
    monkeypatch.setattr(sys.modules[__name__], "local_rollout", function, raising=False)
    args.redrb_rollout_function = f"{__name__}.local_rollout"
    return function


def test_the_surplus_of_a_local_rollout_is_trained_next(args, start, local):
    source = start()
    outputs = [generate_rollout(args, rollout_id, source) for rollout_id in range(3)]
    assert [marks(output) for output in outputs] == [[0, 1], [2, 3], [4, 5]]
    assert local.calls == 2
    assert outputs[0].metrics == {"calls": 1, "rollout/redrb/waiting_groups": 1}
    assert generate_rollout(args, 3, source, evaluation=True) == "evaluated"


def test_finished_groups_of_a_lost_rollout_are_not_generated_again(args, start, local):
    source = start()
    for rollout_id in range(3):
        generate_rollout(args, rollout_id, source)
    successor = start()
    outputs = [generate_rollout(args, rollout_id, successor) for rollout_id in range(3)]
    assert [marks(output) for output in outputs] == [[0, 1], [2, 3], [4, 5]]
    assert local.calls == 2


# checkpoints


@pytest.fixture
def trainer(args, start):
    """Start trainers whose rollouts have two groups each, in the order 0, 1, 2, ..."""
    source = start()
    put_groups([make(mark) for mark in range(12)], args=args)
    return source


def test_a_save_acknowledges_its_rollouts_and_not_those_taken_ahead(args, trainer):
    for rollout_id in range(2):  # train_async.py begins the next rollout before it saves this one
        generate_rollout(args, rollout_id, trainer)
    trainer.save(0)
    assert ledger(trainer.groups.finished) == (8, 2, 2)
    generate_rollout(args, 2, trainer)
    trainer.save(1)
    assert ledger(trainer.groups.finished) == (6, 2, 4)


@pytest.mark.parametrize("resumed", [-1, 0, 1])
def test_a_resumed_trainer_trains_what_its_checkpoint_has_not(args, trainer, start, resumed):
    for rollout_id in range(3):
        generate_rollout(args, rollout_id, trainer)
    if resumed >= 0:
        trainer.save(0)  # of rollout 1 the model is saved, and `save` was not called
    successor = start(resumed)
    done = 2 * resumed + 2
    assert ledger(successor.groups.finished) == (12 - done, 0, done)
    assert marks(generate_rollout(args, resumed + 1, successor)) == [done, done + 1]


def test_files_of_rollouts_without_a_checkpoint_are_deleted(args, trainer, tmp_path):
    for rollout_id in range(4):
        generate_rollout(args, rollout_id, trainer)
    trainer.save(2)
    names = sorted(path.name for path in (tmp_path / "rollout").iterdir())
    assert names == ["redrb_groups_2.json", "redrb_groups_3.json"]


@pytest.mark.parametrize("option", [{"async_save": True}, {"redrb_keep_checkpoints": 1}])
def test_the_checkpoint_before_the_newest_loses_nothing(args, trainer, start, option):
    source = start(-1, **option)
    for rollout_id in range(3):
        generate_rollout(args, rollout_id, source)
        source.save(rollout_id)
    assert ledger(source.groups.finished) == (6, 2, 4)
    successor = start(1)  # the checkpoint of rollout 2 was not complete
    assert marks(generate_rollout(args, 2, successor)) == [4, 5]
    successor.save(2)
    assert ledger(successor.groups.finished) == (6, 2, 4)


def test_each_history_of_checkpoints_has_trained_a_group_once(args, trainer, start):
    source = start(-1, redrb_keep_checkpoints=9)
    for rollout_id in range(4):
        generate_rollout(args, rollout_id, source)
        source.save(rollout_id)
    branch = start(0)
    assert marks(generate_rollout(args, 1, branch)) == [2, 3]
    branch.save(1)
    # back in the old history, whose rollouts 2 and 3 the other one has not overwritten
    old = start(3)
    assert marks(generate_rollout(args, 4, old)) == [8, 9]


def test_without_checkpoints_groups_are_acknowledged_at_once(args, trainer, start, tmp_path):
    source = start(-1, save_interval=None)
    generate_rollout(args, 0, source)
    assert ledger(source.groups.finished) == (10, 0, 2)
    assert not (tmp_path / "rollout").exists()


def test_a_load_in_the_same_process_releases_everything(args, trainer):
    generate_rollout(args, 0, trainer)
    trainer.get_samples(2)
    trainer.load(-1)
    assert ledger(trainer.groups.finished) == (12, 0, 0)
    assert [group[0].prompt for group in trainer.get_samples(2)] == ["p0", "p1"]


def test_a_checkpoint_without_its_file_acknowledges_nothing(args, trainer, start, tmp_path, caplog):
    generate_rollout(args, 0, trainer)
    (tmp_path / "rollout" / "redrb_groups_0.json").unlink()
    assert marks(generate_rollout(args, 1, start(0))) == [0, 1]
    assert "redrb_groups_0.json does not exist" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b'{"trained": {"a": {"x": 1}}}', b"\xff"])
def test_a_damaged_file_is_named(args, trainer, start, tmp_path, content):
    generate_rollout(args, 0, trainer)
    (tmp_path / "rollout" / "redrb_groups_0.json").write_bytes(content)
    with pytest.raises(DecodeError, match=r"redrb_groups_0\.json is damaged"):
        start(0)


def test_groups_of_a_task_that_was_created_anew_are_not_those_of_the_file(args, trainer, start):
    generate_rollout(args, 0, trainer)
    trainer.groups.finished.clear()
    put_groups([make(20), make(21)], args=args)
    assert marks(generate_rollout(args, 1, start(0))) == [20, 21]


def test_a_lease_that_was_lost_is_acknowledged_all_the_same(args, trainer):
    generate_rollout(args, 0, trainer)
    trainer.groups.finished.dismiss(trainer.groups.finished.consumer)
    trainer.save(0)
    assert ledger(trainer.groups.finished) == (10, 0, 2)
