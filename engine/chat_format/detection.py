"""Which dialect a model speaks: the one whose markers its chat template and its vocabulary hold.

Where none of ours is there, a response template (transformers 5, `tokenizer.response_template`) is asked for its
markers. Its own parser is not used: it passes arguments on only when they are whole, and breaks on broken JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.chat_format.calls import ObjectCall
from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from engine.chat_format.harmony import CHANNEL, END, MARKERS, MESSAGE, HarmonyFormat
from engine.chat_format.reasoning import ReasoningMarkers
from engine.chat_format.tagged import TaggedFormat
from engine.chat_format.tool_call_markers import ToolCallMarkers

# A regular expression that matches one text only: letters, and escaped ones.
_PLAIN = re.compile(r"(\\\W|[^\\.+*?()|\[\]{}^$])+")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that markers are made of.

    added    tokens that stand for a text of their own, such as "<tool_call>"
    special  those that are left out when tokens are decoded as text
    encode   the tokens of any text
    """

    added: Mapping[str, int]
    special: frozenset[str]
    encode: Callable[[str], Sequence[int]]

    def token_id(self, text: str) -> int | None:
        """The token that is this text, where there is one."""
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 else None


def detect_chat_format(template: str, lexicon: Vocabulary, response: Mapping[str, object] | None = None) -> ChatFormat:
    """The dialect of a model with this chat template, vocabulary and, maybe, response template."""
    if CHANNEL in template and MESSAGE in template:
        channels = HarmonyFormat(tuple(lexicon.encode(END)), lexicon.token_id("analysis"))
        return ChatFormat(channels, lexicon.added, special=not lexicon.special.isdisjoint(MARKERS))
    fields = _mapping((response or {}).get("fields"))
    frame = _detect_tool_calls(template, lexicon) or _declared_frame(fields)
    thoughts = _detect_reasoning(template, lexicon) or _declared_reasoning(fields)
    markers = frozenset(() if frame is None else frame.markers)
    if thoughts is not None:
        thoughts = replace(
            thoughts, first=lexicon.token_id(thoughts.opens), last=tuple(lexicon.encode(thoughts.closes))
        )
        markers |= {thoughts.opens, thoughts.closes}
    special = not lexicon.special.isdisjoint(markers)
    style = TaggedFormat(thoughts, frame, lexicon.special if special else frozenset())
    return ChatFormat(style, lexicon.added, special)


def _detect_tool_calls(template: str, lexicon: Vocabulary) -> ToolCallMarkers | None:
    for format in TOOL_CALL_FORMATS:
        there = all(marker in template for marker in format.markers)
        if there and (not format.token or format.token in lexicon.added):
            return format.frame
    return None


def _detect_reasoning(template: str, lexicon: Vocabulary) -> ReasoningMarkers | None:
    """Reasoning that the template knows, or else the vocabulary: some templates leave it all to the model."""
    known = [one for one in REASONING_FORMATS if one.closes in template]
    known += [one for one in REASONING_FORMATS if one.opens in lexicon.added and one.closes in lexicon.added]
    return known[0] if known else None


def _declared_reasoning(fields: Mapping[str, object]) -> ReasoningMarkers | None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        opens, closes = _literals(_mapping(fields.get(name)))
        if opens and closes:
            return ReasoningMarkers(opens, closes)
    return None


def _declared_frame(fields: Mapping[str, object]) -> ToolCallMarkers | None:
    """Calls as JSON objects between two literals; nothing else can be told from a response template."""
    field = _mapping(fields.get("tool_calls"))
    opens, closes = _literals(field)
    if not (opens and closes) or field.get("content") != "json":
        return None
    return ToolCallMarkers(ObjectCall(), call=(opens,), call_ends=(closes,))


def _literals(field: Mapping[str, object]) -> tuple[str, str]:
    """What opens and closes a field; "" where that is no literal."""
    return _literal(field, "open"), _literal(field, "close")


def _literal(field: Mapping[str, object], name: str) -> str:
    plain, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(plain, str):
        return plain.strip()
    bare = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    text = re.sub(r"\\(\W)", r"\1", bare)
    return text if _PLAIN.fullmatch(bare) else ""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
