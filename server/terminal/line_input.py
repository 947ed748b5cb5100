"""Input lines with editing, completion of commands and files, and a history that only the user can read."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterable, Iterator, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle

from server.configuration.xdg import state_folder

# A history file of twice as many bytes is shortened.
HISTORY_BYTES = 2**20
PROMPT, CONTINUATION = ">>> ", "... "
QUOTES = '"""'


class LineInput:
    """Reads messages from the terminal.

    commands       names with their slash, for completion
    file_commands  the commands with a file name
    """

    def __init__(self, commands: Sequence[str], file_commands: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            prompt_continuation=CONTINUATION,
            multiline=Condition(lambda: _is_open(self._session.default_buffer.text)),
            completer=_SlashCompleter(commands, file_commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            history=_history(),
        )

    def read(self, prefilled: str = "") -> str:
        """The next message; text between triple quotes may have many lines. Raises EOFError and KeyboardInterrupt."""
        text = self._session.prompt(default=prefilled)
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
        # Bytes outside UTF-8 arrive as surrogates, which no request can have.
        return text.encode(errors="surrogateescape").decode(errors="replace")


def _is_open(text: str) -> bool:
    """Whether closing quotes are missing, so that Enter begins a line."""
    return text.startswith(QUOTES) and not text.removeprefix(QUOTES).rstrip().endswith(QUOTES)


class _SlashCompleter(Completer):
    def __init__(self, commands: Sequence[str], file_commands: Sequence[str]) -> None:
        self._commands, self._file_commands = commands, file_commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, path = text.partition(" ")
        if space and command in self._file_commands:
            yield from self._paths.get_completions(Document(path), complete_event)
        elif text.startswith("/"):
            yield from (Completion(name, -len(text)) for name in self._commands if name.startswith(text))


def _history() -> History:
    """Messages of earlier chats in a file of the state folder; in memory only without such a folder."""
    try:
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / "chat_history"
        path.touch(mode=0o600)
        path.chmod(0o600)
        if path.stat().st_size > 2 * HISTORY_BYTES:
            path.write_bytes(path.read_bytes()[-HISTORY_BYTES:])
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return _FileHistory(path)


class _FileHistory(FileHistory):
    """A message that cannot be written, such as on a full disk, is kept in memory only."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError, UnicodeEncodeError):
            super().store_string(string)


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
