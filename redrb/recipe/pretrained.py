"""Models and tokenizers of transformers, from names, folders and configs; tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redrb.checks import install_command, require_package
from redrb.errors import ConfigError, RecordError
from redrb.recipe.recipe import Prompt


def built(source: Any, dtype: str) -> nn.Module:
    """Return the model that a recipe names: a module, a folder or name, or a config.

    Args:
        source: As `LanguageRecipe.model` returns it.

    Raises:
        ConfigError: It is something else, or transformers is not installed.
    """
    if isinstance(source, nn.Module):
        return source
    transformers = _transformers()
    causal: Any = transformers.AutoModelForCausalLM
    if isinstance(source, str | Path):
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ConfigError(f"--model-dtype {dtype!r} is no dtype of torch, such as bfloat16.")
        return causal.from_pretrained(source, dtype=kind)  # type: ignore[no-any-return]
    if isinstance(source, transformers.PretrainedConfig):
        return causal.from_config(source)  # type: ignore[no-any-return]
    raise ConfigError(
        f"the recipe's model is a {type(source).__name__}: return a torch module, a folder or "
        "name of Hugging Face, or a config of transformers."
    )


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """Return the model, of which only LoRA of PEFT is trained; raises ConfigError without peft."""
    require_package("peft", extra="lora")
    import peft

    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return peft.get_peft_model(model, settings)


def config_folder(source: str | Path) -> Path:
    """Return the folder with the JSON files of a model; of a name the one in the cache."""
    transformers = _transformers()
    return Path(transformers.utils.cached_file(source, "config.json")).parent


def tokenizer_of(source: Any) -> Any:
    """Return the tokenizer of a folder or name; raises ConfigError if the model is neither."""
    if not isinstance(source, str | Path):
        raise ConfigError(
            "the recipe has no tokenizer: give it a functools.cached_property named tokenizer, or "
            "override encode, decode and eos_token_id."
        )
    return _transformers().AutoTokenizer.from_pretrained(source)


def encoded(prompt: Prompt, tokenizer: Callable[[], Any]) -> Tensor:
    """Return the token ids of a prompt, int64 `[P]`.

    Args:
        tokenizer: Returns the tokenizer; called only where there are no `input_ids`.

    Raises:
        RecordError: It has neither, or no token.
    """
    if "input_ids" in prompt:
        ids = prompt["input_ids"]
    elif isinstance(prompt.get("prompt"), str):
        ids = tokenizer()(prompt["prompt"])["input_ids"]
    elif "prompt" in prompt:
        known = tokenizer()
        if getattr(known, "chat_template", "") is None:
            raise ConfigError(
                "prompts are chat messages, and the model's tokenizer has no chat template: use a "
                "model that is trained for chats (often named -Instruct), or give texts."
            )
        ids = known.apply_chat_template(
            list(prompt["prompt"]), add_generation_prompt=True, return_dict=True
        )["input_ids"]
    else:
        raise RecordError(
            f"a prompt has the keys {', '.join(map(str, prompt))}: it needs prompt (a text, or a "
            "list of messages) or input_ids.",
            field="prompt",
        )
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    if tokens.dim() != 1 or not len(tokens):
        raise RecordError(
            f"a prompt has token ids of shape {list(tokens.shape)}: give one or more, [P].",
            field="input_ids",
        )
    return tokens


def _transformers(needing: str = "the recipe's model") -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{needing} needs transformers: {install_command('recipes')}; in a container, build "
            "the image with the extra recipes, or name transformers in requirements.txt."
        ) from error
    return transformers


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer of transformers with one token for each character, and BOS, EOS and PAD.

    For small models that are trained from nothing: nothing is downloaded. Prompts begin with BOS.

    Raises:
        ConfigError: transformers is not installed.
    """
    transformers = _transformers("character_tokenizer")
    import tokenizers  # of transformers
    from tokenizers import models, pre_tokenizers, processors

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *dict.fromkeys(characters)])}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words["<bos>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )
