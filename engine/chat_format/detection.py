"""Detects the chat format of a model by the markers in its chat template and its vocabulary.

Without a known format, markers are read from a response template (transformers 5, `tokenizer.response_template`). Its
own parser is not used: it emits arguments only when they are complete, and fails on invalid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.chat_format.calls import ObjectCall
from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from engine.chat_format.harmony import CHANNEL, END, MARKERS, MESSAGE, HarmonyFormat
from engine.chat_format.markers import ReasoningMarkers, ToolCallMarkers
from engine.chat_format.tagged import TaggedFormat

# A regular expression that matches one text only: literal and escaped characters.
_PLAIN = re.compile(r"(\\\W|[^\\.+*?()|\[\]{}^$])+")


@dataclass(frozen=True, slots=True)
class AddedVocabulary:
    """Tokens of a model's vocabulary that markers may consist of.

    added    added tokens by their text, such as "<tool_call>"
    special  tokens that are skipped when decoding to text
    encode   tokens of any text
    """

    added: Mapping[str, int]
    special: frozenset[str]
    encode: Callable[[str], Sequence[int]]

    def token_id(self, text: str) -> int | None:
        """The token of `text`, if it is one token."""
        tokens = self.encode(text)
        return tokens[0] if len(tokens) == 1 else None


@dataclass(frozen=True, slots=True)
class ChatFormatSource:
    """Values from which the chat format of a model is detected again, in another process.

    encodings  tokens of the texts that the detection encodes
    """

    template: str
    added: dict[str, int]
    special: frozenset[str]
    encodings: dict[str, tuple[int, ...]]
    response: dict[str, object] | None

    def detect(self) -> ChatFormat:
        """The chat format, as `detect_chat_format` found it."""
        vocabulary = AddedVocabulary(self.added, self.special, self.encodings.__getitem__)
        return detect_chat_format(self.template, vocabulary, self.response)


def chat_format_source(
    template: str, vocabulary: AddedVocabulary, response: Mapping[str, object] | None = None
) -> ChatFormatSource:
    """The values that `detect_chat_format` uses."""
    encodings: dict[str, tuple[int, ...]] = {}

    def encode(text: str) -> Sequence[int]:
        return encodings.setdefault(text, tuple(vocabulary.encode(text)))

    detect_chat_format(template, replace(vocabulary, encode=encode), response)
    response = None if response is None else dict(response)
    return ChatFormatSource(template, dict(vocabulary.added), vocabulary.special, encodings, response)


def detect_chat_format(
    template: str, vocabulary: AddedVocabulary, response: Mapping[str, object] | None = None
) -> ChatFormat:
    """The chat format for a chat template, a vocabulary and, optionally, a response template."""
    if CHANNEL in template and MESSAGE in template:
        harmony = HarmonyFormat(tuple(vocabulary.encode(END)), vocabulary.token_id("analysis"))
        return ChatFormat(harmony, vocabulary.added, special=not vocabulary.special.isdisjoint(MARKERS))
    fields = _mapping((response or {}).get("fields"))
    tool_calls = _detect_tool_calls(template, vocabulary) or _declared_tool_calls(fields)
    reasoning = _detect_reasoning(template, vocabulary) or _declared_reasoning(fields)
    markers = frozenset(() if tool_calls is None else tool_calls.markers)
    if reasoning is not None:
        reasoning = replace(
            reasoning,
            start_token=vocabulary.token_id(reasoning.opens),
            end_tokens=tuple(vocabulary.encode(reasoning.closes)),
        )
        markers |= {reasoning.opens, reasoning.closes}
    special = not vocabulary.special.isdisjoint(markers)
    answer_format = TaggedFormat(reasoning, tool_calls, vocabulary.special if special else frozenset())
    return ChatFormat(answer_format, vocabulary.added, special)


def _detect_tool_calls(template: str, vocabulary: AddedVocabulary) -> ToolCallMarkers | None:
    for format in TOOL_CALL_FORMATS:
        matches = all(marker in template for marker in format.markers)
        if matches and (not format.token or format.token in vocabulary.added):
            return format.tool_calls
    return None


def _detect_reasoning(template: str, vocabulary: AddedVocabulary) -> ReasoningMarkers | None:
    """Reasoning markers of the template, else of the vocabulary: some templates leave the markers to the model."""
    formats = [markers for markers in REASONING_FORMATS if markers.closes in template]
    formats += [
        markers
        for markers in REASONING_FORMATS
        if markers.opens in vocabulary.added and markers.closes in vocabulary.added
    ]
    return formats[0] if formats else None


def _declared_reasoning(fields: Mapping[str, object]) -> ReasoningMarkers | None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        opens, closes = _literals(_mapping(fields.get(name)))
        if opens and closes:
            return ReasoningMarkers(opens, closes)
    return None


def _declared_tool_calls(fields: Mapping[str, object]) -> ToolCallMarkers | None:
    """JSON calls between two literals; a response template declares no other notation."""
    field = _mapping(fields.get("tool_calls"))
    opens, closes = _literals(field)
    if not (opens and closes) or field.get("content") != "json":
        return None
    return ToolCallMarkers(ObjectCall(), call=(opens,), call_ends=(closes,))


def _literals(field: Mapping[str, object]) -> tuple[str, str]:
    """The opening and closing literal of a field; "" for anything but a literal."""
    return _literal(field, "open"), _literal(field, "close")


def _literal(field: Mapping[str, object], name: str) -> str:
    plain, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(plain, str):
        return plain.strip()
    escaped = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    return re.sub(r"\\(\W)", r"\1", escaped) if _PLAIN.fullmatch(escaped) else ""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
