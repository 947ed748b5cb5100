"""Where the messages of a rendered conversation begin and end.

A template is a program, so nobody but itself knows where it writes a message. Rendering the first few messages alone
and comparing tells: what both renderings begin with are those messages. That is done for a handful of places only, the
ones that other conversations or the next turn share, or that a context shift must know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from engine.prefix import Pieces, common_prefix

Messages = Sequence[Mapping[str, object]]
# What rendering raises where a template refuses a conversation.
REFUSALS = (TemplateError, ValueError, TypeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True)
class Outline:
    """Places in a rendered conversation, in letters or tokens as it was rendered.

    ends       of the leading system messages, of all before the last user message, and of that one
    system     where the leading system messages end; 0: there are none, or nobody can tell
    last_user  where the last user message stands; None: there is none
    """

    ends: tuple[int, ...]
    system: int
    last_user: tuple[int, int] | None


def outline(messages: Messages, whole: Pieces, render: Callable[[Messages], Pieces]) -> Outline:
    """The outline of `whole`, which is what rendering all messages gave; `render` renders the first ones."""
    roles = [message.get("role") for message in messages]
    system = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    users = [at for at, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else 0
    ends: dict[int, int] = {0: 0}
    for count in sorted({system, last, last + 1} - {0}):
        try:
            ends[count] = common_prefix(render(messages[:count]), whole)
        except REFUSALS:
            continue  # a template may want a user to speak first, or turns that alternate: then the place is unknown
    start = max(at for count, at in ends.items() if count <= last)
    last_user = (start, max(ends.get(last + 1, len(whole)), start)) if users else None
    return Outline(tuple(sorted({*ends.values()} - {0})), ends.get(system, 0), last_user)
