"""Finds the message that a token of a prompt belongs to.

Only the chat template defines where messages are in the prompt. The start of a message is found by rendering the
messages with a changed first character and comparing the tokens; the message of a token by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio.to_thread

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class MessageLocator:
    """Messages and their prompt.

    render  tokens of messages, rendered as `prompt` was; runs in worker threads
    """

    messages: Messages
    prompt: tuple[int, ...]
    render: Callable[[Messages], Sequence[int]]

    async def message_at(self, token: int) -> int | None:
        """Index of the message that contains or precedes a token; None: before the text of the first message."""
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
