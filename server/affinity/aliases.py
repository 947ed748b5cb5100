"""Conversations by the responses in them: a request that continues a response belongs to the conversation of it."""

from __future__ import annotations

from collections import OrderedDict

# Responses of all conversations, about 150 bytes each.
LIMIT = 1 << 16


class ConversationAliases:
    """Further keys of conversations, such as keys of their responses; the least recent ones are dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._conversations: OrderedDict[str, str] = OrderedDict()

    def add(self, alias: str, conversation: str) -> None:
        """Record another key of a conversation."""
        self._conversations[alias] = conversation
        self._conversations.move_to_end(alias)
        while len(self._conversations) > self._limit:
            self._conversations.popitem(last=False)

    def resolve(self, key: str) -> str:
        """The key of the conversation; `key` itself unless it is an alias."""
        if key in self._conversations:
            self._conversations.move_to_end(key)
        return self._conversations.get(key, key)

    def __len__(self) -> int:
        return len(self._conversations)
