"""Which message of a conversation a token of its prompt stands in.

A template is a program, so nobody but itself knows where it writes a message. Rendering the conversation with another
beginning of one message, and comparing, tells where that message begins; halving finds the one that a token stands in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """A conversation and its prompt.

    render  the tokens of a conversation, made as the prompt was; for worker threads
    """

    messages: Messages
    prompt: tuple[int, ...]
    render: Callable[[Messages], Sequence[int]]

    async def message_at(self, token: int) -> int | None:
        """The message that a token stands in or behind; None: it stands before the text of the first one."""
        return await anyio.to_thread.run_sync(self._message, token)

    def _message(self, token: int) -> int | None:
        behind = bisect_right(range(len(self.messages)), token, key=self._start)
        return behind - 1 if behind else None

    def _start(self, at: int) -> int:
        """The first token of a message's text."""
        content = str(self.messages[at]["content"])
        changed = {**self.messages[at], "content": ("+" if content.startswith("-") else "-") + content}
        other = self.render([*self.messages[:at], changed, *self.messages[at + 1 :]])
        pairs = zip(self.prompt, other, strict=False)
        return next((place for place, (one, two) in enumerate(pairs) if one != two), len(self.prompt))
