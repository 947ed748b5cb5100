"""`cellar chat`: an interactive chat on a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from server.configuration.settings import Settings
from server.terminal.chat import Chat
from server.terminal.client import ServerError
from server.terminal.connection import connected
from server.terminal.conversation import Conversation
from server.terminal.options import ChatOptions

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def run_chat(model: str | None, options: ChatOptions, settings: Settings) -> int:
    """Chat until the end of the input; the exit code."""
    messages = Console(stderr=True, highlight=False)
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        messages.print("cellar: chat needs a terminal; cellar run takes a prompt from a pipe", soft_wrap=True)
        return EXIT_USAGE
    conversation = Conversation(system=options.system, parameters=options.parameters)
    try:
        with (
            end_by_signals(),
            starting(messages) as note,
            connected(model, options.url, settings, note=note) as served,
        ):
            note("")
            # A started server has its own handler of SIGTERM, like Ctrl-C.
            with end_by_signals():
                Chat(served, conversation, Console(highlight=False)).run()
    except ServerError as error:
        messages.print(Text(f"cellar: {error}"), soft_wrap=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


@contextmanager
def starting(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows the state of a start: a spinner on a terminal, nothing elsewhere; "" ends it."""
    status, begun = console.status(""), time.monotonic()

    def note(text: str) -> None:
        if not text:
            status.stop()
        elif console.is_terminal:
            status.update(Text(f"{text}, {time.monotonic() - begun:.0f} s"))
            status.start()

    try:
        yield note
    finally:
        status.stop()


@contextmanager
def end_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and the loss of the terminal end the process in order, with the server it started."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
