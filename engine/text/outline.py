"""Where the messages of a rendered conversation begin and end.

A template is a program, so nobody but itself knows where it writes a message. Rendering the first few messages alone
and comparing tells: what both renderings begin with are those messages. That is done for a handful of places only, the
ones that other conversations or the next turn share, or that a context shift must know, and those that a client names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from jinja2 import TemplateError

from engine.text.prefix import Pieces, common_prefix_length

Messages = Sequence[Mapping[str, object]]
# What rendering raises where a template refuses a conversation.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class Outline(Generic[Pieces]):
    """Places in a rendered conversation, in letters or tokens as it was rendered.

    checkpoints  of the leading system messages, of all before the last user message, of that one, and at breakpoints
    system_end     where the leading system messages end; 0: there are none, or nobody can tell
    last_user  where the last user message stands; None: there is none
    generation_prompt     what stands behind all messages, or with a continued one, from its beginning on
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
    """The outline of `rendered`, which is what rendering all messages gave; `render` renders the first ones.

    finished     messages that are not to be continued: all, or all but the last
    breakpoints  (message, letters): behind so many letters of the content of a message is a place to know
    """
    roles = [message.get("role") for message in messages]
    system = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    users = [at for at, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else 0
    ends: dict[int, int] = {0: 0}
    for count in sorted({system, last, last + 1, finished_messages} - {0}):
        end = _rendered_length(messages[:count], rendered, render)
        if end is not None:
            ends[count] = end
    start = max(at for count, at in ends.items() if count <= last)
    last_user = (start, max(ends.get(last + 1, len(rendered)), start)) if users else None
    marks = {end for count, end in ends.items() if count in (system, last, last + 1)}
    for place in dict.fromkeys(breakpoints):
        shown = _truncated(messages, *place)
        known = len(shown) in ends and shown == messages[: len(shown)]
        marks.add(ends[len(shown)] if known else _rendered_length(shown, rendered, render) or 0)
    return Outline(
        tuple(sorted(marks - {0})),
        ends.get(system, 0),
        last_user,
        rendered[ends.get(finished_messages, len(rendered)) :],
    )


def _rendered_length(messages: Messages, rendered: Pieces, render: Callable[[Messages], Pieces]) -> int | None:
    """How far these messages are the beginning of the whole; None: the template refuses them."""
    try:
        return common_prefix_length(render(messages), rendered)
    except TEMPLATE_ERRORS:
        return None  # a template may want a user to speak first, or turns that alternate: then the place is unknown


def _truncated(messages: Messages, at: int, characters: int) -> Messages:
    """The messages up to so many letters of the content of one."""
    content = messages[at].get("content")
    if not isinstance(content, str) or characters >= len(content):
        return messages[: at + 1]
    # A template may trim what it writes: so another letter than the next one stands behind the cut.
    last = "-" if content[characters] != "-" else "+"
    return [*messages[:at], {**messages[at], "content": content[:characters] + last}]
