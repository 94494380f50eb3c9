"""`Tokenizer`: token ids to text, by a `tokenizer.json`; no code of the folder is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from redrb.checks import install_command
from redrb.errors import ConfigError

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
