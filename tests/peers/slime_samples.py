"""redrb on slime's own `Sample` and data set; run by `test_slime.py` beside slime's checkout."""

from __future__ import annotations

import json
import uuid
from types import SimpleNamespace

import pytest
import torch
from _shared import install_stubs

install_stubs(with_transformers=True)

from slime.rollout import data_source  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from redrb.compat.sample_groups.packing import pack_group, unpack_group  # noqa: E402
from redrb.compat.slime import RedrbDataSource  # noqa: E402


def test_a_sample_of_slime_comes_back_with_every_field():
    sample = Sample(group_index=3, index=9, prompt="1 + 1?", response="2", label="2", reward=1.0)
    sample.append_response_tokens(
        SimpleNamespace(sglang_speculative_algorithm=True),
        tokens=[5, 6],
        log_probs=[-0.1, -0.2],
        meta_info={
            "finish_reason": {"type": "stop"},
            "weight_version": "4",
            "spec_accept_token_num": 2,
            "prompt_tokens": 7,
        },
    )
    sample.rollout_routed_experts = torch.arange(6, dtype=torch.int32).reshape(3, 2)
    sample.extra = {"not": "declared"}
    items = pack_group([sample])
    ((back,), _) = unpack_group(items, Sample)
    assert torch.equal(back.rollout_routed_experts, sample.rollout_routed_experts)
    back.rollout_routed_experts = sample.rollout_routed_experts = None
    assert back == sample
    assert back.extra == sample.extra
    assert (back.status, items[0].policy_version) == (Sample.Status.COMPLETED, 4)


@pytest.mark.parametrize("shuffled", [False, True])
def test_prompts_come_as_slimes_own_data_source_gives_them(tmp_path, monkeypatch, shuffled):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(data_source, "load_processor", lambda *_, **__: None)
    rows = [json.dumps({"text": f"p{number}", "label": str(number)}) for number in range(7)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    args = SimpleNamespace(
        redrb_task=uuid.uuid4().hex,
        rollout_global_dataset=True,
        prompt_data=str(tmp_path / "prompts.jsonl"),
        hf_checkpoint="",
        dump_details=None,
        rollout_max_prompt_len=None,
        input_key="text",
        multimodal_keys=None,
        label_key="label",
        metadata_key="metadata",
        tool_key=None,
        apply_chat_template=False,
        apply_chat_template_kwargs=None,
        rollout_seed=42,
        rollout_shuffle=shuffled,
        n_samples_per_prompt=2,
        buffer_filter_path=None,
    )
    own, ours = data_source.RolloutDataSource(args), RedrbDataSource(args)
    assert len(ours) == len(own) == 7
    for count in (3, 2, 4, 5, 1, 6):  # three epochs
        assert ours.get_samples(count) == own.get_samples(count)
