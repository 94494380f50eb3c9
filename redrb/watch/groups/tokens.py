"""`Tokens`: prompt and response of a sample, told apart, without padding, and their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from redrb.checks import install_command
from redrb.errors import ConfigError
from redrb.watch.groups.choice import Limits
from redrb.watch.groups.records import TokensView
from redrb.watch.groups.values import numbers_of

_FILE: Final = "tokenizer.json"

_MOST_BYTES: Final = 256 << 20

_MOST_PENDING: Final = 8
"""Tokens after which a character that is not complete is shown as it is."""

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Decodes token ids; safe among threads."""

    def __init__(self, backend: Any, *, name: str = "") -> None:
        """Use a `tokenizers.Tokenizer`."""
        self._backend = backend
        self.name = name

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Return the tokenizer of a Hugging Face folder, or of a `tokenizer.json`.

        Raises:
            ConfigError: There is no such file, it cannot be read, or the library `tokenizers` is
                missing.
        """
        given = Path(path).expanduser()
        file = given / _FILE if given.is_dir() else given
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ConfigError(
                f"text needs the library tokenizers: {install_command('inspect')}, or leave the "
                "tokenizer out to see token ids."
            ) from error
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise ConfigError(f"{file} is no tokenizer: it is larger than 256 MiB.")
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the tokenizer {file} cannot be read: {error}. Give a Hugging Face folder with "
                f"a {_FILE}, or that file; `AutoTokenizer.from_pretrained(NAME)."
                "save_pretrained(FOLDER)` writes one."
            ) from error
        try:
            return cls(Backend.from_str(text), name=str(given))
        except Exception as error:
            raise ConfigError(f"{file} is not a {_FILE} of Hugging Face: {error}.") from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        known = [each for each in ids if 0 <= each < 2**32]
        decoded: str = self._backend.decode(known, skip_special_tokens=False)
        return decoded

    def unknown(self, ids: Iterable[int]) -> set[int]:
        """Return the ids that are not in the vocabulary, and so have no text."""
        token = self._backend.id_to_token
        return {each for each in set(ids) if not 0 <= each < 2**32 or token(each) is None}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; together they are `text(ids)`, as far as tokens allow.

        A character that several tokens make up is in the piece of the last one.
        """
        pieces: list[str] = []
        begin = shown = 0  # tokens whose text is the context, and those that are shown
        for end in range(1, len(ids) + 1):
            before = self.text(ids[begin:shown])
            whole = self.text(ids[begin:end])
            if whole.endswith(_INCOMPLETE) and end - shown < _MOST_PENDING and end < len(ids):
                pieces.append("")
                continue
            pieces.append(whole[len(before) :] if whole.startswith(before) else whole)
            begin, shown = shown, end
        return pieces


_OF_ACTIONS: Final = ("action_log_probs", "action_mask", "token_versions", "advantages", "values")
"""Fields whose length is the number of actions, `[A]`."""


def tokens_of(
    arrays: Mapping[str, NDArray[Any]], limits: Limits, tokenizer: Tokenizer | None
) -> TokensView | None:
    """Return the tokens of a sample; None if it has no sequences of token ids.

    The actions are the last A tokens. A sample without fields of actions is a prompt alone.
    """
    ids = arrays.get("sequences")
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        return None
    attention = arrays.get("attention_mask")
    counts = np.ones(len(ids), bool)
    if attention is not None and attention.shape == ids.shape:
        counts = attention != 0
    known = (arrays[name] for name in _OF_ACTIONS if name in arrays)
    actions = min(next((len(array) for array in known if array.ndim == 1), 0), len(ids))
    split = len(ids) - actions
    prompt = ids[:split][counts[:split]]
    kept = np.flatnonzero(counts[split:])[: limits.tokens]
    response = ids[split:][kept]

    def of(name: str) -> NDArray[Any] | None:
        array = arrays.get(name)
        return array[kept] if array is not None and array.shape == (actions,) else None

    def numbers(name: str) -> tuple[float | None, ...]:
        array = of(name)
        return () if array is None else numbers_of(array)

    mask, versions = of("action_mask"), of("token_versions")
    prompt_ids = prompt[-limits.tokens :].tolist()
    response_ids = response.tolist()
    pieces = [] if tokenizer is None else tokenizer.pieces(response_ids)
    return TokensView(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        prompt_text=None if tokenizer is None else tokenizer.text(prompt_ids),
        response_text=None if tokenizer is None else tokenizer.text(response_ids),
        response_pieces=tuple(pieces),
        trained=() if mask is None else tuple((mask != 0).tolist()),
        log_probs=numbers("action_log_probs"),
        advantages=numbers("advantages"),
        values=numbers("values"),
        kl=numbers("kl"),
        versions=() if versions is None else tuple(versions.tolist()),
        prompt_tokens=len(prompt),
        response_tokens=int(counts[split:].sum()),
    )


def text_notes(samples: Sequence[TokensView | None], tokenizer: Tokenizer) -> list[str]:
    """Return why samples of a group have no text, or only a part of it."""
    shown = [each for each in samples if each is not None]
    if not shown:
        return ["its samples have no token ids (sequences), so there is no text"]
    notes = []
    ids = [each for tokens in shown for each in (*tokens.prompt_ids, *tokens.response_ids)]
    unknown = tokenizer.unknown(ids)
    if unknown:
        count = sum(each in unknown for each in ids)
        notes.append(
            f"{count:,} of {len(ids):,} token ids, such as {min(unknown)}, are not in the "
            "vocabulary of the tokenizer and have no text: is it that of the model?"
        )
    if not any(tokens.response_tokens for tokens in shown):
        names = ", ".join(_OF_ACTIONS)
        notes.append(f"no field ({names}) tells which tokens are the response: it is empty")
    return notes
