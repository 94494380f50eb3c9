"""PPO on a small model that learns to repeat a letter: replace model, prompts and reward."""

from functools import cached_property

from transformers import LlamaConfig

from redrb.recipe import Completion, PPORecipe, character_tokenizer, option


class MyRecipe(PPORecipe):
    """Repeats the letter of its prompt."""

    max_new_tokens = 4
    actor_learning_rate = 3e-3
    critic_learning_rate = 3e-3
    target_reward = 0.9
    steps = 300

    letters: str = option("abcdef", "letters of the prompts")

    @cached_property
    def tokenizer(self):
        """One token for each letter; without this, it is the tokenizer of the model's folder."""
        return character_tokenizer(self.letters)

    def model(self):
        """Return a small model; or a folder or name, such as "Qwen/Qwen2.5-0.5B"."""
        return LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def prompts(self):
        """Return prompts; their further keys reach the reward."""
        return [{"prompt": letter, "answer": letter} for letter in self.letters]

    def held_out(self):
        """Return prompts for evaluation."""
        return self.prompts()

    def reward(self, completion: Completion) -> float:
        """Return the reward of one completion."""
        return completion.text.count(completion["answer"]) / self.max_new_tokens
