"""`replacing`: a file gets its name, and replaces an older one, only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from redrb.errors import ConfigError
from redrb.staging import staging, sync_folder


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `target` when the block ends without an error.

    Until then it is in a folder of `staging`.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with staging(target) as folder:
            fresh = folder / target.name
            with fresh.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(target)
            sync_folder(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error
