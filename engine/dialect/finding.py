"""Which dialect a model speaks: the one whose markers its chat template and its vocabulary hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.dialect.calls import ObjectCall
from engine.dialect.dialect import Dialect
from engine.dialect.frame import Frame
from engine.dialect.tagged import Tagged
from engine.dialect.thoughts import Thoughts


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The tokens that markers are made of.

    added    tokens that stand for a text of their own, such as "<tool_call>"
    special  those that are left out when tokens are decoded as text
    encode   the tokens of any text
    """

    added: Mapping[str, int]
    special: frozenset[str]
    encode: Callable[[str], Sequence[int]]


_HERMES = Frame(ObjectCall(), call=("<tool_call>",), ends=("</tool_call>",))
_THINK = Thoughts("<think>", "</think>")


def find_dialect(template: str | None, lexicon: Lexicon) -> Dialect:
    """The dialect of a model with this chat template and vocabulary."""
    template = template or ""
    frame = _HERMES if "<tool_call>" in template else None
    thoughts = _THINK if "</think>" in template else None
    markers = {*(frame.markers if frame else ()), *((thoughts.opens, thoughts.closes) if thoughts else ())}
    special = not lexicon.special.isdisjoint(markers)
    if thoughts is not None:
        last = tuple(lexicon.encode(thoughts.closes))
        thoughts = replace(thoughts, first=lexicon.added.get(thoughts.opens), last=last)
    tokens = {marker: lexicon.added[marker] for marker in markers if marker in lexicon.added}
    return Dialect(Tagged(thoughts, frame, lexicon.special if special else frozenset()), tokens, special)
