"""Input lines with editing, completion of commands and files, and a history that only the user can read."""

from __future__ import annotations

import contextlib
import json
import os
import readline
import sys
import termios
from collections.abc import Iterator, Sequence
from glob import escape, glob

from server.configuration.xdg import state_folder

HISTORY_LINES = 1000
PROMPT, CONTINUATION = ">>> ", "... "
QUOTES = '"""'


class LineInput:
    """Reads messages from the terminal.

    commands       names with their slash, for completion
    file_commands  the commands with a file name
    """

    def __init__(self, commands: Sequence[str], file_commands: Sequence[str]) -> None:
        self._commands, self._file_commands = commands, file_commands
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
        readline.set_auto_history(False)
        self._history = History()
        for text in self._history.read():
            readline.add_history(text)

    def read(self, prefilled: str = "") -> str:
        """The next message; text between triple quotes may have many lines. Raises EOFError and KeyboardInterrupt."""
        # The text of a startup hook is part of the line and can be edited.
        readline.set_startup_hook(lambda: readline.insert_text(prefilled))
        try:
            text = input(PROMPT)
        finally:
            readline.set_startup_hook(None)
        if text.startswith(QUOTES):
            text = _read_quoted(text.removeprefix(QUOTES))
        if text.strip():
            readline.add_history(text)
            self._history.append(text)
        return text

    def _complete(self, text: str, state: int) -> str | None:
        words = readline.get_line_buffer().split(" ", 1)
        if len(words) == 1:
            found = [name for name in self._commands if name.startswith(text)] if text.startswith("/") else []
        elif words[0] in self._file_commands:
            found = [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob(escape(text) + "*"))]
        else:
            found = []
        return found[state] if state < len(found) else None


def _read_quoted(first: str) -> str:
    """The lines up to the closing quotes."""
    lines = [first]
    while not lines[-1].endswith(QUOTES):
        lines.append(input(CONTINUATION))
    return "\n".join([*lines[:-1], lines[-1].removesuffix(QUOTES)]).strip("\n")


class History:
    """Messages of earlier chats in a file of the state folder, one JSON text a line; nothing without such a folder.

    readline's own file has no messages with many lines, and its format differs between libraries.
    """

    def __init__(self) -> None:
        try:
            folder = state_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / "chat_history"
            path.touch(mode=0o600)
            path.chmod(0o600)
        except (OSError, RuntimeError):
            self.path = None
        else:
            self.path = path

    def read(self) -> list[str]:
        """The latest messages. A file of twice as many is shortened."""
        if self.path is None:
            return []
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 2 * HISTORY_LINES:
                self.path.write_text("".join(f"{line}\n" for line in lines[-HISTORY_LINES:]), encoding="utf-8")
        except OSError:
            return []
        return [text for line in lines[-HISTORY_LINES:] if (text := _decoded(line)) is not None]

    def append(self, text: str) -> None:
        """Add a message to the file."""
        if self.path is not None:
            with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")


def _decoded(line: str) -> str | None:
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


@contextlib.contextmanager
def hidden_typing() -> Iterator[None]:
    """Within the block, typed letters are not shown: they would stand inside the answer. Ctrl-C still works."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    after = termios.tcgetattr(terminal)
    after[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, after)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
