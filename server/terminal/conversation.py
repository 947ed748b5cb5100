"""A conversation of `cellar chat`: its messages, its parameters, and its file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FORMAT = "cellar-chat"


class ConversationError(ValueError):
    """A file cannot be read or written; the text is for the user."""


@dataclass(slots=True)
class Conversation:
    """The messages between user and model.

    images      data URLs of images for the next message
    parameters  fields of every request, such as temperature
    file        the file that holds an earlier state of this conversation
    """

    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    file: Path | None = None

    def body(self, model: str) -> dict[str, Any]:
        """The body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.parameters, "model": model, "messages": [*system, *self.messages]}

    def add_user(self, text: str) -> None:
        """Add a message with the waiting images."""
        content: Any = text
        if self.images:
            images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*images, {"type": "text", "text": text}]
            self.images = []
        self.messages.append({"role": "user", "content": content})

    def add_answer(self, text: str) -> None:
        """Add a message of the model."""
        self.messages.append({"role": "assistant", "content": text})

    def take_last_user(self) -> str | None:
        """Remove the last message of the user and its answer; its text, or None. Its images wait again."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] != "user":
                continue
            if isinstance(message["content"], str):
                return message["content"]
            self.images = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
            return next((part["text"] for part in message["content"] if part["type"] == "text"), "")
        return None

    def clear(self) -> None:
        """Remove the messages; system prompt and parameters stay."""
        self.messages, self.images, self.file = [], [], None

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to a file, but not over a file of something else. Raises ConversationError."""
        if path.exists() and path != self.file:
            raise ConversationError(f"{path} exists already: name another file")
        document = {
            "format": _FORMAT,
            "model": model,
            "system": self.system,
            "parameters": self.parameters,
            "messages": self.messages,
        }
        try:
            path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConversationError(f"{path} cannot be written: {error.strerror}") from error
        self.file = path

    def load(self, path: Path) -> None:
        """Continue the conversation of a file. Raises ConversationError and keeps this one for any other file."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConversationError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConversationError(f"{path} is no saved conversation: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ConversationError(f"{path} is no saved conversation: /save writes them")
        messages, parameters, system = (document.get(name) for name in ("messages", "parameters", "system"))
        if not isinstance(parameters, dict) or not isinstance(system, str | None) or not _are_messages(messages):
            raise ConversationError(f"{path} is damaged: its messages or parameters have another form")
        self.system, self.parameters, self.messages = system, parameters, list(messages or [])
        self.images, self.file = [], path


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.get("role") in ("user", "assistant")
        and isinstance(message.get("content"), str | list)
        for message in messages
    )
