"""A pseudo terminal in which a test runs a command, presses keys, and reads the screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

from redrb.environment import child_environment
from redrb.scopes import Closing

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ENTER, _LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal(Closing):
    """A process whose input, output and controlling terminal are a pseudo terminal.

    Attributes:
        process: The process.
        output: All that it has written to the terminal.
    """

    def __init__(
        self, command: Sequence[str], *, width: int = 80, height: int = 24, **environment: str
    ) -> None:
        self._ours, theirs = os.openpty()
        self.resize(width, height)
        self.output = ""
        self._before = 0
        # a session leader without a terminal gets the one that it opens
        script = 'exec "$@" < "$TTY" > "$TTY" 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command],
            start_new_session=True,
            env=child_environment(
                **{"TERM": "xterm-256color", "TTY": os.ttyname(theirs), **environment}
            ),
        )
        self._theirs = theirs  # stays open: the terminal outlives the process

    def close(self) -> None:
        """End the process, and the terminal with it."""
        self.process.kill()
        self.process.wait(10)
        os.close(self._ours)
        os.close(self._theirs)

    @property
    def restored(self) -> bool:
        """Whether the ordinary screen is shown, with echo, lines and a cursor."""
        flags = termios.tcgetattr(self._theirs)[3]
        ordinary = flags & termios.ECHO and flags & termios.ICANON
        shown = self.output.rfind(_LEAVE) >= self.output.rfind(_ENTER)
        cursor = self.output.rfind("\x1b[?25h") >= self.output.rfind("\x1b[?25l")
        return bool(ordinary and shown and cursor)

    @property
    def screen(self) -> list[str]:
        """The lines of the newest complete picture, without styles."""
        pictures = re.findall(r"\x1b\[H((?:(?!\x1b\[H).)*?)\x1b\[J", self.output, re.DOTALL)
        text = _STYLE.sub("", pictures[-1] if pictures else "")
        return [line.removesuffix("\x1b[K") for line in text.replace("\r", "").split("\n")]

    def resize(self, width: int, height: int) -> None:
        """Change the size; the process gets SIGWINCH."""
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    @property
    def written(self) -> str:
        """The output since the last keys, without control sequences."""
        return _CONTROL.sub("", self.output[self._before :])

    def press(self, keys: str) -> None:
        """Send what keys send."""
        while self._read(0):
            pass
        self._before = len(self.output)
        os.write(self._ours, keys.encode())

    def writes(self, text: str, timeout_s: float = 30) -> None:
        """Wait until the process has written a text since the last keys."""
        self.until(lambda: text in self.written, timeout_s)

    def until(self, seen: Callable[[], object], timeout_s: float = 30) -> None:
        """Read what the process writes until something is seen.

        Raises:
            AssertionError: It is not seen in time.
        """
        end = time.monotonic() + timeout_s
        while not seen():
            left = end - time.monotonic()
            assert left > 0, f"not seen: {self.screen} {self.output[-2000:]!r}"
            self._read(min(left, 0.1))

    def shows(self, text: str, timeout_s: float = 30) -> None:
        """Wait until a picture has a text."""
        self.until(lambda: text in "\n".join(self.screen), timeout_s)

    def end(self, timeout_s: float = 30) -> int:
        """Wait for the end of the process, and return its exit status."""
        self.until(lambda: self.process.poll() is not None, timeout_s)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return False
        self.output += os.read(self._ours, 65_536).decode(errors="replace")
        return True
