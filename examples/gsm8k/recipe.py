"""GRPO on GSM8K: word problems, whose reward is 1 for the right number in a box.

README.md has the commands: for one GPU, a node with eight, several nodes, and for a CPU.
"""

import random
from functools import cached_property

import torch

from redrb.recipe import Completion, GRPORecipe, boxed, data_rows, final_answer, option, same_answer


class GSM8K(GRPORecipe):
    """Solves word problems."""

    engine = "vllm"
    model_name: str = option("Qwen/Qwen2.5-0.5B-Instruct", "folder, or name of Hugging Face")
    dataset: str = option("gsm8k.jsonl", "file that data.py has written")
    held_out_rows: int = option(200, "last rows of the file, which only evaluate", least=0)
    instruction: str = option(
        "Think step by step, then put the final answer in \\boxed{}.", "text after each problem"
    )
    warm_up: int = option(
        0, "supervised steps before the first version, for a model without any skill", agree=False
    )

    group_size = 8
    prompts_per_step = groups = 16
    max_new_tokens = 512
    learning_rate = 1e-6
    truncated_importance = 2.0
    mixed_precision = "bf16"
    gradient_checkpointing = True
    micro_batch_tokens = 16384
    evaluate_every = 20
    weights_timeout = idle_timeout = 1800.0

    def model(self):
        return self.model_name

    @cached_property
    def rows(self):
        return [
            {
                "prompt": [
                    {"role": "user", "content": f"{row['question']} {self.instruction}".strip()}
                ],
                "answer": final_answer(row["answer"]),
                "solution": row["answer"],
            }
            for row in data_rows(self.dataset)
        ]

    def prompts(self):
        return self.rows[: len(self.rows) - self.held_out_rows]

    def held_out(self):
        return self.rows[len(self.rows) - self.held_out_rows :]

    def reward(self, completion: Completion) -> float:
        return float(same_answer(boxed(completion.text), completion["answer"]))

    def initialise(self, models):
        """Show the model some solutions; a model that can solve problems does not need it."""
        actor, numbers = models["actor"], random.Random(self.seed)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
        for _ in range(self.warm_up):
            shown = [self.solved(row) for row in numbers.choices(self.prompts(), k=32)]
            tokens = torch.nn.utils.rnn.pad_sequence([each for each, _ in shown], True)
            labels = torch.nn.utils.rnn.pad_sequence([each for _, each in shown], True, -100)
            loss = actor(input_ids=tokens.to(actor.device), labels=labels.to(actor.device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def solved(self, row):
        """Return the tokens of a problem with its solution, and the same as labels."""
        steps = row["solution"].rpartition("####")[0].strip()
        text = f"{steps} \\boxed{{{row['answer']}}}{self.tokenizer.eos_token}"
        own = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = self.encode(row)
        return torch.cat([prompt, own]), torch.cat([torch.full_like(prompt, -100), own])
