"""Makes a model that knows a little of `redrb new agent`: a Qwen2 of 0.4 million parameters.

`python examples/agent/small_model.py FOLDER` writes it, with a tokenizer and a chat template. It is
shown how to call the calculator, for so few steps that it is often wrong.
"""

import json
import random
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

STEPS = 140
LARGEST = 9
QUESTION = "What is {a} * {b}?\nUse the calculator, then put the final answer in \\boxed{{}}."
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>"
    "{% endfor %}<eos>{% endfor %}assistant:"
)


def shown(a, b):
    """Return an episode as texts: what is given, what the model writes, and so on."""
    question = QUESTION.format(a=a, b=b)
    call = {"name": "calculate", "arguments": {"a": a, "operator": "*", "b": b}}
    return (
        f"user: {question}<eos>assistant:",
        f"<tool_call>\n{json.dumps(call)}\n</tool_call><eos>",
        f"tool: {a * b}<eos>assistant:",
        f"\\boxed{{{a * b}}}<eos>",
    )


def tokenizer():
    """Return a tokenizer that knows each byte, each digit, and the words of an episode."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words.train_from_iterator(["".join(shown(3, 4))] * 50, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = CHAT
    return made


def batch(words, numbers, size):
    """Return tokens of episodes, and labels: only what the model writes is learned."""
    tokens, labels = [], []
    for _ in range(size):
        row, wanted = [], []
        for place, text in enumerate(
            shown(numbers.randint(1, LARGEST), numbers.randint(1, LARGEST))
        ):
            part = words(text, add_special_tokens=False)["input_ids"]
            row += part
            wanted += part if place % 2 else [-100] * len(part)
        tokens.append(torch.tensor(row))
        labels.append(torch.tensor(wanted))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tokens, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words, numbers = tokenizer(), random.Random(0)
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
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens, labels = batch(words, numbers, 32)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.2f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(sys.argv[1])
    words.save_pretrained(sys.argv[1])
    print(f"{sys.argv[1]}: loss {loss.item():.2f} after {STEPS} supervised steps")


if __name__ == "__main__":
    main()
