"""System messages for chat templates without them: their text joins the next user message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.text.outline import TEMPLATE_ERRORS, Messages
from engine.text.parts import content_length, content_text, join

_SEPARATOR = "\n\n"
_SAMPLE_SYSTEM = "You answer in Latin."
_SAMPLE_USER_MESSAGE = {"role": "user", "content": "Hello."}


@dataclass(slots=True)
class FoldedMessages:
    """Messages without system messages.

    places  of each original message: the index of the message with its text, and the characters before it there
    """

    messages: list[dict[str, object]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)


def has_system_role(render: Callable[[Messages], str]) -> bool:
    """Whether the template renders system messages; some refuse them, others leave them out."""
    try:
        render([_SAMPLE_USER_MESSAGE])
    except TEMPLATE_ERRORS:
        # Nothing is known of a template that refuses a single question.
        return True
    try:
        return _SAMPLE_SYSTEM in render([{"role": "system", "content": _SAMPLE_SYSTEM}, _SAMPLE_USER_MESSAGE])
    except TEMPLATE_ERRORS:
        return False


def fold_system_messages(messages: Messages) -> FoldedMessages:
    """The messages, with the text of system messages in the next user message, or at the end."""
    folded, waiting = FoldedMessages(), ""
    moved: list[int] = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        if message.get("role") == "system":
            folded.places.append((0, len(waiting)))
            moved.append(index)
            waiting += content_text(content) + _SEPARATOR
            continue
        folded.places.append((len(folded.messages), 0))
        if waiting and message.get("role") == "user":
            _move(folded, moved, characters=0)
            folded.places[index] = (len(folded.messages), len(waiting))
            message, waiting = {**message, "content": join(waiting, content)}, ""
        folded.messages.append(dict(message))
    if waiting:
        _append(folded, moved, waiting.removesuffix(_SEPARATOR))
    return folded


def _append(folded: FoldedMessages, moved: list[int], text: str) -> None:
    """System messages after the last user message: in it if it is the last one, because templates demand turns."""
    last = folded.messages[-1] if folded.messages else None
    if last is None or last.get("role") != "user":
        _move(folded, moved, characters=0)
        folded.messages.append({"role": "user", "content": text})
        return
    before = join(last.get("content"), _SEPARATOR)
    folded.messages.pop()
    _move(folded, moved, characters=content_length(before))
    folded.messages.append({**last, "content": join(before, text)})


def _move(folded: FoldedMessages, moved: list[int], *, characters: int) -> None:
    """System messages become part of the message that is added next."""
    for index in moved:
        folded.places[index] = (len(folded.messages), folded.places[index][1] + characters)
    moved.clear()
