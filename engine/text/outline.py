"""Finds the boundaries of messages in a rendered conversation.

A chat template is a program, so the end of a message is found by rendering: the first messages alone and all messages
have a common prefix, which ends there. Only a few boundaries are searched: for prefixes shared with other conversations
or the next turn, for context shifts, and for breakpoints of the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from jinja2 import TemplateError

from engine.text.parts import truncate
from engine.text.prefix import Pieces, common_prefix_length

Messages = Sequence[Mapping[str, object]]
# Exceptions of a template that refuses a conversation.
TEMPLATE_ERRORS = (
    *(TemplateError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, ArithmeticError, RecursionError),
)


@dataclass(frozen=True, slots=True)
class Outline(Generic[Pieces]):
    """Positions in a rendered conversation, in characters or tokens.

    checkpoints        ends of the system messages, of the messages before the last user message and of that message;
                       breakpoints
    system_end         end of the leading system messages; 0 if there are none, or it was not found
    last_user          range of the last user message, if there is one
    generation_prompt  the text after the last message; of a continued message its text from the start
    """

    checkpoints: tuple[int, ...]
    system_end: int
    last_user: tuple[int, int] | None
    generation_prompt: Pieces


def outline(
    messages: Messages,
    rendered: Pieces,
    render: Callable[[Messages], Pieces],
    *,
    finished_messages: int,
    breakpoints: Sequence[tuple[int, int]] = (),
) -> Outline[Pieces]:
    """The outline of `rendered`, the rendered `messages`; `render` renders some of them.

    finished_messages  messages that are not continued: all, or all but the last
    breakpoints        (message, characters): positions in the content of messages
    """
    roles = [message.get("role") for message in messages]
    system = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
    users = [index for index, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else 0
    ends: dict[int, int] = {0: 0}
    for count in sorted({system, last, last + 1, finished_messages} - {0}):
        end = _rendered_length(messages[:count], rendered, render)
        if end is not None:
            ends[count] = end
    start = max(index for count, index in ends.items() if count <= last)
    last_user = (start, max(ends.get(last + 1, len(rendered)), start)) if users else None
    checkpoints = {end for count, end in ends.items() if count in (system, last, last + 1)}
    for breakpoint in dict.fromkeys(breakpoints):
        first = _truncated(messages, *breakpoint)
        is_known = len(first) in ends and first == messages[: len(first)]
        checkpoints.add(ends[len(first)] if is_known else _rendered_length(first, rendered, render) or 0)
    return Outline(
        tuple(sorted(checkpoints - {0})),
        ends.get(system, 0),
        last_user,
        rendered[ends.get(finished_messages, len(rendered)) :],
    )


def _rendered_length(messages: Messages, rendered: Pieces, render: Callable[[Messages], Pieces]) -> int | None:
    """The end of the first messages in the rendered conversation; None if the template refuses them."""
    try:
        return common_prefix_length(render(messages), rendered)
    except TEMPLATE_ERRORS:
        return None  # some templates demand a user message first, or alternating roles


def _truncated(messages: Messages, index: int, characters: int) -> Messages:
    """The messages up to a number of characters of the content of the last one."""
    truncated = truncate(messages[index].get("content"), characters)
    if truncated is None:
        return messages[: index + 1]
    return [*messages[:index], {**messages[index], "content": truncated}]
