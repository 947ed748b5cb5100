"""A command on a pseudo-terminal: keys in, text out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS, COLUMNS = 40, 100
WAIT_SECONDS = 90.0
# The space after it is a movement of the cursor.
PROMPT = ">>>"
CTRL_C, CTRL_D = "\x03", "\x04"
# The terminal becomes that of the process, so its Ctrl-C is a signal; a shell that runs the tests in the background
# would have it ignored.
_START = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from server.cli import main
main()
"""
_escape = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


class TerminalSession:
    """`cellar` with arguments on a terminal of 40 lines and 100 columns."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            cwd=ROOT,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            start_new_session=True,
        )
        os.close(inner)
        self.text, self._position = "", 0

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.end_by(signal.SIGTERM)
        finally:
            self.process.kill()
            os.close(self._terminal)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def wait(self, text: str) -> str:
        """The output from the last wait up to the end of `text`, without colours."""
        give_up = time.monotonic() + WAIT_SECONDS
        while (found := self.text.find(text, self._position)) < 0:
            assert time.monotonic() < give_up, self.text[self._position :][-1000:]
            assert self._read(), f"the end of the output:\n{self.text[-1000:]}"
        start, self._position = self._position, found + len(text)
        return self.text[start : self._position]

    def ask(self, line: str, end: str = PROMPT) -> str:
        """Type a line; the output after it, up to the next prompt."""
        self.type(f"{line}\r")
        self.wait(line)
        # The prompt and the line may be drawn again before the end of the line.
        self.wait("\n")
        return self.wait(end)

    def end_by(self, number: signal.Signals) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """The exit code, once the process has ended."""
        give_up = time.monotonic() + WAIT_SECONDS
        while self._read():
            assert time.monotonic() < give_up, self.text[-1000:]
        return self.process.wait(WAIT_SECONDS)

    def _read(self) -> bool:
        """Add what the command prints within a moment; False at its end."""
        if not select.select([self._terminal], [], [], 0.2)[0]:
            return True
        try:
            output = os.read(self._terminal, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += _escape.sub("", output.decode(errors="replace"))
        return bool(output)
