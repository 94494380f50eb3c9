"""`FullScreen`: the whole terminal for one program, given back however the program ends."""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[H\x1b[J\x1b[?25h\x1b[?1049l"
"""Empties the screen first: a terminal with only one screen would print on in its last line."""

_HOME, _END_OF_LINE, _END = "\x1b[H", "\x1b[K", "\x1b[J"
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class FullScreen:
    """The other screen of a terminal, without echo and without a cursor.

    Ctrl-C raises KeyboardInterrupt and SIGTERM, SIGHUP and SIGQUIT raise SystemExit in the main
    thread, so that leaving the `with` block restores the terminal. Ctrl-Z restores it while the
    process is suspended.
    """

    def __init__(self, keyboard: int, screen: int) -> None:
        """Prepare it; a `with` block of the main thread uses it.

        Args:
            keyboard: File descriptor of the terminal, from which keys are read.
            screen: File descriptor of the terminal, to which pictures are written.
        """
        self._keyboard, self._screen = keyboard, screen
        self._attributes: list[Any] = []
        self._handlers: dict[int, Any] = {}
        self._wakes, self._wake_end = os.pipe()
        self._entered = False

    def __enter__(self) -> Self:
        for end in (self._wakes, self._wake_end):
            os.set_blocking(end, False)
        self._attributes = termios.tcgetattr(self._keyboard)
        try:
            for number in _ENDING:
                self._handle(number, _end)
            self._handle(signal.SIGTSTP, self._suspend)
            self._handle(signal.SIGCONT, self._resume)
            self._handle(signal.SIGWINCH, lambda *_: self.wake())
            self._show()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hide()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wakes)
        wake_end, self._wake_end = self._wake_end, -1
        os.close(wake_end)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        size = os.get_terminal_size(self._screen)
        return size.columns or 80, size.lines or 24

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines, which must fit."""
        text = f"{_END_OF_LINE}\n".join(lines)
        self._write(f"{_HOME}{text}{_END_OF_LINE}{_END}")

    def wake(self) -> None:
        """End a call of `read`; may be called in any thread, and after the block has ended."""
        end = self._wake_end
        if end >= 0:
            try:
                os.write(end, b"!")
            except (BlockingIOError, OSError):  # it is full, so that `read` ends anyway; or closed
                return

    def read(self, timeout_s: float) -> bytes | None:
        """Return what the keyboard sends; b"" after `wake` or the timeout, None if it is closed."""
        ready, _, _ = select.select([self._keyboard, self._wakes], [], [], timeout_s)
        if self._wakes in ready:
            os.read(self._wakes, 4096)
        if self._keyboard in ready:
            return os.read(self._keyboard, 4096) or None
        return b""

    def _show(self) -> None:
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        self._entered = True
        self._write(_ENTER)

    def _hide(self) -> None:
        if self._entered:
            self._entered = False
            try:
                self._write(_LEAVE)
                termios.tcsetattr(self._keyboard, termios.TCSANOW, self._attributes)
            except (OSError, termios.error):  # the terminal was closed: nothing is left to restore
                return

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._screen, data) :]

    def _handle(self, number: int, handler: Any) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        """Give the terminal back and stop this process, as Ctrl-Z does without a handler."""
        self._hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        if not self._entered:  # nothing stopped it: no shell would continue it
            self._resume(signal.SIGCONT, None)

    def _resume(self, _number: int, _frame: FrameType | None) -> None:
        """Take the terminal again; also after SIGSTOP, when a shell may have changed it."""
        signal.signal(signal.SIGTSTP, self._suspend)
        self._show()
        self.wake()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
