"""Makes the model of the example on a CPU: a Qwen2 of 0.4 million random parameters.

`python examples/gsm8k/small_model.py vllm/model` writes it, with a tokenizer of 288 tokens.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def tokenizer():
    """Return a tokenizer that knows each byte, and the pieces of one sentence."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator(["What is 3 plus 4? The answer is 7."] * 50, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = CHAT
    return made


def main():
    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
    words.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
