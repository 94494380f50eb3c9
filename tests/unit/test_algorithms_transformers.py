"""The algorithms on Hugging Face's causal models, built from a config: nothing is downloaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrb.algorithms import (
    Completions,
    GRPOExperienceMaker,
    GRPOStep,
    NaiveExperienceMaker,
    PPOStep,
    ValueHead,
    action_log_probs,
    action_logits,
    action_values,
    generate,
    sequence_rewards,
)

transformers = pytest.importorskip("transformers")

VOCABULARY, EOS, PAD, WANTED = 24, 3, 0, 7
TOKENS = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11], [0, 12, 13, 14, 15]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
}


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **TOKENS,
    )
    return seeded(transformers.LlamaForCausalLM, config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS
    )
    return seeded(transformers.GPT2LMHeadModel, config)


def seeded(build: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(config).eval()


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request):
    return request.param()


def options(seed: int = 0, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    given = {"max_new_tokens": 6, "eos_token_id": EOS, "pad_token_id": PAD, "generator": generator}
    return {**given, **changes}


def share(completions: Completions) -> Tensor:
    """The share of a completion's tokens that are the wanted one."""
    rows = range(len(completions))
    return torch.stack([(completions.completion(row) == WANTED).float().mean() for row in rows])


def test_the_cache_does_not_change_the_result(model):
    calls = []
    model.register_forward_pre_hook(
        lambda _module, _args, given: calls.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    done = generate(model, PROMPTS, **options(temperature=0.8))
    actions = done.action_mask.shape[1]
    assert calls == [5] + [1] * (actions - 1)
    logits = action_logits(model, done.sequences, done.attention_mask, actions)
    assert logits.shape == (3, actions, VOCABULARY)
    again = action_log_probs(logits, done.sequences, actions, temperature=0.8) * done.action_mask
    torch.testing.assert_close(done.action_log_probs, again.detach(), atol=1e-5, rtol=1e-4)


def test_the_likeliest_tokens_equal_those_of_transformers_generate(model):
    done = generate(model, PROMPTS, **options(do_sample=False))
    expected = model.generate(**PROMPTS, max_new_tokens=6, do_sample=False)
    for row in range(3):
        completion = done.completion(row).tolist()
        assert expected[row, 5 : 5 + len(completion)].tolist() == completion


def test_a_value_head_sits_on_the_trunk(model):
    critic = ValueHead(model)
    assert critic.trunk is model.base_model
    nn.init.ones_(critic.head.weight)
    values = action_values(critic, PROMPTS["input_ids"], PROMPTS["attention_mask"], 2)
    assert values.shape == (3, 2)
    alone = action_values(critic, torch.tensor([[5, 6]]), None, 1)
    torch.testing.assert_close(values[0, -1], alone[0, -1], atol=1e-5, rtol=1e-4)


def test_classifiers_are_critics_and_reward_models():
    config = copy.deepcopy(llama().config)
    config.num_labels = 1
    tokens, mask = PROMPTS["input_ids"], PROMPTS["attention_mask"]
    scorer = seeded(transformers.LlamaForSequenceClassification, config)
    assert sequence_rewards(scorer, tokens, mask).shape == (3,)
    critic = seeded(transformers.LlamaForTokenClassification, config)
    assert action_values(critic, tokens, mask, 2).shape == (3, 2)


def test_bfloat16_models_give_float32_experience(model):
    actor = copy.deepcopy(model).bfloat16()
    critic = ValueHead(copy.deepcopy(actor))
    maker = NaiveExperienceMaker(actor, critic, share, copy.deepcopy(actor))
    made = maker.make_experience(PROMPTS, **options())
    for field in (made.action_log_probs, made.values, made.reward, made.kl, made.advantages):
        assert field.dtype == torch.float32
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=1e-3)
    metrics = PPOStep(actor, critic, optimizer, optimizer)(made)
    # a cached step and a whole pass round differently in bfloat16
    assert abs(metrics["approx_kl"]) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_models_on_a_gpu_take_prompts_and_batches_from_the_cpu(model):
    actor = copy.deepcopy(model).bfloat16().cuda()
    critic, reference = ValueHead(copy.deepcopy(actor)), copy.deepcopy(actor)
    of_both = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    steps = (PPOStep(actor, critic, of_both, of_both), GRPOStep(actor, of_both, beta=0.1))
    makers = (
        NaiveExperienceMaker(actor, critic, share, reference),
        GRPOExperienceMaker(actor, share, reference),
    )
    for maker, step in zip(makers, steps, strict=True):
        made = maker.make_experience(PROMPTS, **options())
        assert made.sequences.is_cuda
        made.to_device("cpu")
        assert abs(step(made)["approx_kl"]) < 1e-2
