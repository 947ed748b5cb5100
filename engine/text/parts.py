"""The content of a message: a text, or a list of parts with texts, images and sounds.

A position in a content counts the characters of texts; each other part counts as one character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def is_parts(content: object) -> bool:
    """Whether the content is a list of parts."""
    return isinstance(content, Sequence) and not isinstance(content, str)


def content_length(content: object) -> int:
    """The last position in a content."""
    return sum(map(_part_length, _parts(content)))


def content_text(content: object) -> str:
    """The texts of a content."""
    return "".join(str(part["text"]) for part in _parts(content) if "text" in part)


def join(before: object, after: object) -> object:
    """Two contents as one: a text if both are texts."""
    if is_parts(before) or is_parts(after):
        return [*_parts(before), *_parts(after)]
    return f"{before or ''}{after or ''}"


def truncate(content: object, position: int) -> object | None:
    """The content up to a position, with another character behind it; None if it has no more than that.

    A template may trim spaces at the end, so a character other than the next one follows.
    """
    if position >= content_length(content):
        return None
    if not is_parts(content):
        text = str(content)
        return text[:position] + _other_character(text[position])
    parts: list[object] = []
    for part in _parts(content):
        length = _part_length(part)
        if position < length:
            return [*parts, {"type": "text", "text": truncate(part.get("text", " "), position)}]
        position -= length
        parts.append(part)
    return parts


def flatten(content: object, markers: Mapping[str, str]) -> object:
    """A content as text: the markers of its images and sounds by type, then its texts."""
    if not is_parts(content):
        return content
    return "".join(markers.get(str(part.get("type")), "") for part in _parts(content)) + content_text(content)


def as_parts(content: object) -> object:
    """A text as a list of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _other_character(character: str) -> str:
    return "-" if character != "-" else "+"


def _parts(content: object) -> Sequence[Mapping[str, object]]:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def _part_length(part: Mapping[str, object]) -> int:
    return len(str(part["text"])) if "text" in part else 1
