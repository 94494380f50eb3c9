"""`character_tokenizer`: a tokenizer for small models, without a download."""

from __future__ import annotations

from typing import Any

from redrb.checks import install_command
from redrb.errors import ConfigError


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer of transformers with one token for each character, and BOS, EOS and PAD.

    For small models that are trained from nothing: nothing is downloaded. Prompts begin with BOS.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        import tokenizers
        import transformers
        from tokenizers import models, pre_tokenizers, processors
    except ImportError as error:
        raise ConfigError(
            f"character_tokenizer needs transformers: {install_command('recipes')}; in a "
            "container, build the image with the extra recipes, or name transformers in "
            "requirements.txt."
        ) from error

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *dict.fromkeys(characters)])}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words["<bos>"])]
    )
    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(
        tokenizer_object=inner,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )
