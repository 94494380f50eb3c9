"""Experience makers: every field against a second computation, and its way through a store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import (
    GAE,
    Completions,
    GRPOExperienceMaker,
    NaiveExperienceMaker,
    Overlong,
    action_log_probs,
    action_logits,
    action_values,
)
from redrb.errors import ConfigError, RecordError
from redrb.experience import Experience, make_experience_batch, split_experience_batch
from redrb.experience.batching import padded_rows
from redrb.experience.checking import check_groups
from redrb.experience.records import STANDARD_FIELDS, named_tensors
from tests.networks import Answering, PlainActor, PlainCritic, SampleCritic, seeded

PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 4, 5, 6]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": 3}


class CountingReward(nn.Module):
    """The number of tokens that count."""

    def forward(self, _sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(1)


def lengths(completions: Completions) -> list[int]:
    return [len(completions.completion(row)) for row in range(len(completions))]


def options(**changes: Any) -> dict[str, Any]:
    return {**OPTIONS, "generator": torch.Generator().manual_seed(0), **changes}


def naive(critic: type[nn.Module] = PlainCritic, **changes: Any) -> NaiveExperienceMaker:
    return NaiveExperienceMaker(
        seeded(PlainActor), seeded(critic, 1), CountingReward(), seeded(PlainActor, 2), **changes
    )


def of(experience: Experience, name: str) -> Tensor:
    tensor = named_tensors(experience)[name]
    assert isinstance(tensor, Tensor)
    return tensor


def test_every_field_is_filled():
    experience = naive().make_experience(PROMPTS, policy_version=3, **options())
    fields = {name: of(experience, name) for name in STANDARD_FIELDS}
    length, actions = fields["sequences"].shape[1], fields["action_mask"].shape[1]
    assert {name: tuple(tensor.shape) for name, tensor in fields.items()} == {
        "sequences": (3, length),
        "action_log_probs": (3, actions),
        "values": (3, actions),
        "reward": (3,),
        "kl": (3, actions),
        "advantages": (3, actions),
        "attention_mask": (3, length),
        "action_mask": (3, actions),
    }
    for name in ("action_log_probs", "values", "reward", "kl", "advantages"):
        assert fields[name].dtype == torch.float32
        assert not fields[name].requires_grad
    for name in ("action_log_probs", "values", "kl", "advantages"):
        assert (fields[name][~fields["action_mask"]] == 0).all()
    assert not check_groups([padded_rows(experience)])
    assert [item.policy_version for item in split_experience_batch(experience)] == [3, 3, 3]


def test_reward_and_advantages_are_coatis():
    maker = naive(kl_coef=0.2, kl_estimator="coati")
    made = maker.make_experience(PROMPTS, **options(temperature=0.7))
    mask, sequences, attention = (
        of(made, name) for name in ("action_mask", "sequences", "attention_mask")
    )
    actions = mask.shape[1]
    log_probs, expected = (
        action_log_probs(
            action_logits(model, sequences, attention, actions), sequences, actions, temperature=0.7
        )
        for model in (maker.actor, maker.initial_model)
    )
    log_r = log_probs - expected
    kl = (log_r.exp() - 1 - log_r) * mask
    values = action_values(maker.critic, sequences, attention, actions)
    reward = attention.sum(1) - 0.2 * kl.sum(1) / mask.sum(1)
    close = torch.testing.assert_close
    close(of(made, "action_log_probs"), (log_probs * mask).detach())
    close(of(made, "kl"), kl.detach())
    close(of(made, "values"), (values * mask).detach())
    close(of(made, "raw_reward"), attention.sum(1).float())
    close(of(made, "reward"), reward.detach())
    close(of(made, "advantages"), ((reward[:, None] - values) * mask).detach())
    assert (kl[mask] > 0).all()


def test_a_value_a_sample_gives_an_advantage_a_sample():
    made = naive(SampleCritic).make_experience(PROMPTS, **options())
    torch.testing.assert_close(of(made, "advantages"), of(made, "reward") - of(made, "values"))
    assert of(made, "advantages").shape == (3,)


def test_with_gae_each_action_pays_and_the_reward_stays_raw():
    maker = naive(kl_coef=0.2, gae=GAE(gamma=1.0, lam=1.0))
    made = maker.make_experience(PROMPTS, **options())
    assert of(made, "reward").tolist() == of(made, "attention_mask").sum(1).tolist()
    assert made.tensors == {}
    # with both at 1, the first advantage and value are the whole return
    returns = (of(made, "advantages") + of(made, "values"))[:, 0]
    expected = of(made, "reward") - 0.2 * of(made, "kl").sum(1)
    torch.testing.assert_close(returns, expected)


def test_gae_needs_a_value_at_each_action():
    with pytest.raises(RecordError, match="gives one a sample"):
        naive(SampleCritic, gae=GAE()).make_experience(PROMPTS, **options())


def test_a_function_may_score():
    maker = naive()
    maker.reward_model = lengths
    made = maker.make_experience(PROMPTS, **options())
    assert of(made, "raw_reward").tolist() == of(made, "action_mask").sum(1).tolist()
    maker.reward_model = lambda _completions: [1.0]
    with pytest.raises(RecordError, match="for 3 completions"):
        maker.make_experience(PROMPTS, **options())


def test_networks_run_in_eval_mode_and_get_their_modes_back():
    maker = naive()
    seen = []
    maker.critic.register_forward_hook(lambda module, *_: seen.append(module.training))
    maker.actor.train()
    maker.critic.eval()
    maker.make_experience(PROMPTS, **options())
    assert seen == [False]
    assert maker.actor.training
    assert maker.initial_model.training
    assert not maker.critic.training


def test_experience_survives_a_round_trip_through_samples():
    for made in (
        naive().make_experience(PROMPTS, policy_version=1, **options()),
        grpo(initial_model=seeded(PlainActor, 2)).make_experience(PROMPTS, **options()),
    ):
        items = split_experience_batch(made)
        for item in items:
            assert not check_groups([[item]])
        again = make_experience_batch(items)
        assert named_tensors(again).keys() == named_tensors(made).keys()
        for name, tensor in named_tensors(again).items():
            assert torch.equal(tensor, of(made, name)), name


def test_wrong_options_of_makers_are_named():
    with pytest.raises(ConfigError, match="kl_coef -1"):
        naive(kl_coef=-1)
    with pytest.raises(ConfigError, match="kl_estimator='k9'"):
        naive(kl_estimator="k9")
    with pytest.raises(ConfigError, match="group_size 0"):
        grpo(group_size=0)


def grpo(**changes: Any) -> GRPOExperienceMaker:
    given = {"reward_model": lengths, "group_size": 4, **changes}
    return GRPOExperienceMaker(seeded(PlainActor), **given)


def test_groups_are_compared_within_themselves():
    made = grpo().make_experience(PROMPTS, policy_version=5, **options())
    assert made.values is made.kl is None
    assert made.tensors == {}
    reward, advantages = of(made, "reward").view(3, 4), of(made, "advantages").view(3, 4)
    assert reward.flatten().tolist() == of(made, "action_mask").sum(1).tolist()
    deviation = reward - reward.mean(1, keepdim=True)
    torch.testing.assert_close(advantages, deviation / (reward.std(1, keepdim=True) + 1e-4))
    assert advantages.abs().sum() > 0
    for row, item in enumerate(split_experience_batch(made)):
        prompt = PROMPTS["input_ids"][row // 4][PROMPTS["attention_mask"][row // 4].bool()]
        assert item.sequences[: len(prompt)].tolist() == prompt.tolist()
        assert item.policy_version == 5


def test_every_prompt_is_a_group_with_a_unique_name():
    makings = [grpo().make_experience(PROMPTS, **options()) for _ in range(2)]
    names = [item.group_id for made in makings for item in split_experience_batch(made)]
    assert len(names) == 24
    assert len(set(names)) == 6
    assert all(len(set(names[at : at + 4])) == 1 for at in range(0, 24, 4))


def test_a_references_log_probs_travel():
    reference = seeded(PlainActor, 2)
    made = grpo(initial_model=reference).make_experience(PROMPTS, **options())
    mask, sequences = of(made, "action_mask"), of(made, "sequences")
    logits = action_logits(reference, sequences, made.attention_mask, mask.shape[1])
    expected = action_log_probs(logits, sequences, mask.shape[1]).detach() * mask
    torch.testing.assert_close(of(made, "reference_log_probs"), expected)
    log_r = expected - of(made, "action_log_probs")
    torch.testing.assert_close(of(made, "kl"), (log_r.exp() - 1 - log_r) * mask)


def test_a_reward_model_with_one_number_a_token_is_refused():
    with pytest.raises(RecordError, match="one number a sample"):
        grpo(reward_model=Answering(torch.zeros(12, 9))).make_experience(PROMPTS, **options())


@pytest.mark.parametrize("algorithm", ["naive", "grpo"])
def test_each_token_has_its_version_and_each_sample_its_oldest(algorithm):
    maker = (
        naive()
        if algorithm == "naive"
        else GRPOExperienceMaker(seeded(PlainActor), CountingReward(), group_size=2)
    )
    versions = iter([None, 4, 4, 6, 7])
    given = options(before_token=lambda: next(versions))
    if algorithm == "grpo":
        given["eos_token_id"] = None
    made = maker.make_experience(PROMPTS, policy_version=2, **given)
    assert made.token_versions.dtype == torch.int64
    assert made.token_versions.shape == made.action_mask.shape
    assert made.policy_version == [2] * len(made)  # of the first token nothing is known
    versions = iter([4, 4, 6, 7, 7])
    made = maker.make_experience(PROMPTS, policy_version=2, **given)
    assert made.policy_version == [4] * len(made)
    assert made.token_versions is not None
    mask, expected = made.action_mask, torch.tensor([4, 4, 6, 7, 7])
    for row, counts in zip(made.token_versions, mask.bool(), strict=True):
        assert torch.equal(row[counts], expected[: len(row)][counts])
        assert bool((row[~counts] == -1).all())
    items = split_experience_batch(made)
    for item in items:
        assert not check_groups([[item]])
        assert item.token_versions is not None
        assert item.policy_version == 4
    again = make_experience_batch(items)
    assert again.token_versions is not None
    assert torch.equal(again.token_versions, made.token_versions)


def test_a_subclass_may_read_prompts_and_options_of_its_own():
    """Texts that another inference engine samples from; an option of its `make_experience`."""

    class Mine(NaiveExperienceMaker):
        def sample(self, inputs, **generate_kwargs):
            raise NotImplementedError(str(inputs))

        def make_experience(self, inputs, *, bonus=0.0, **rest):
            return super().make_experience(inputs, **rest)

    maker = Mine(seeded(PlainActor), seeded(PlainCritic), CountingReward(), None)
    with pytest.raises(NotImplementedError, match="a text"):
        maker.make_experience(["a text"], bonus=1.0)

    class WithBonus(NaiveExperienceMaker):
        def make_experience(self, inputs, *, bonus=0.0, **rest):
            return super().make_experience(inputs, **rest)

    known = WithBonus(seeded(PlainActor), seeded(PlainCritic), CountingReward(), None)
    known.check_options({"bonus": 1.0, "max_new_tokens": 5})
    with pytest.raises(ConfigError, match="bonos"):
        known.check_options({"bonos": 1.0, "max_new_tokens": 5})


def test_a_punished_reward_keeps_the_raw_one():
    """Advantages compare rewards after the punishment, with the method that is asked for."""
    overlong = Overlong(limit=5, cache=5, most=2.0)
    maker = GRPOExperienceMaker(
        seeded(PlainActor), lengths, group_size=4, method="rloo", overlong=overlong
    )
    made = maker.make_experience(PROMPTS, **options(max_new_tokens=5))
    tokens = of(made, "action_mask").sum(1)
    raw = of(made, "raw_reward")
    torch.testing.assert_close(raw, tokens.float())
    torch.testing.assert_close(of(made, "reward"), raw - 2.0 * tokens / 5)
    rewards = of(made, "reward").view(3, 4)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    torch.testing.assert_close(of(made, "advantages").view(3, 4), rewards - others)
