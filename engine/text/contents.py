"""Images and sounds in a rendered conversation: their markers are replaced, and their tokens are found.

A chat template writes a marker for each content, which its processor replaces by placeholders. Markers that a message
contains as text are marked before the template renders it, and stay text.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from engine.errors import InvalidRequest
from engine.text.outline import TEMPLATE_ERRORS, Messages
from engine.text.parts import as_parts, flatten
from engine.types.array import Array
from engine.types.content import MAX_IMAGE_PIXELS, MAX_REQUEST_PIXELS, Content, ContentKind, Upload

# What a chat template reads as content of a message: texts and lists of parts, lists alone, or texts alone, where
# markers of images and sounds precede the text.
ContentForm = Literal["any", "parts", "text"]
# Stands in front of a special token that is part of a message (`mark_control_tokens` of transformers).
TEXT_MARK = "\U000f0000"
_SAMPLE_TEXT = "Hello."


@dataclass(frozen=True, slots=True)
class ProcessedContent:
    """An image or a sound, as the model's processor prepares it.

    replacement  text in place of the marker: the placeholders, and what stands around them
    arrays       inputs of the model, by name
    digest       SHA-256 of all that decides the arrays and the placeholders
    pixels       of an image, as decoded
    """

    kind: ContentKind
    replacement: str
    arrays: tuple[tuple[str, Array], ...]
    digest: bytes
    pixels: int = 0


class ContentProcessor(Protocol):
    """The processor of a model. For any thread.

    markers       what chat templates write for a content, by kind; each is one token
    placeholders  tokens whose embeddings come from contents
    """

    @property
    def markers(self) -> Mapping[ContentKind, str]: ...

    @property
    def placeholders(self) -> frozenset[int]: ...

    def process(self, upload: Upload) -> ProcessedContent:
        """Decode and process a content alone. Raises InvalidContent, and Overloaded."""


def process_uploads(processor: ContentProcessor, uploads: Sequence[Upload]) -> list[ProcessedContent]:
    """The contents of a request. Raises InvalidContent, also for more than MAX_REQUEST_PIXELS, and Overloaded."""
    contents: list[ProcessedContent] = []
    free_pixels = MAX_REQUEST_PIXELS
    for upload in uploads:
        contents.append(processor.process(replace(upload, max_pixels=min(free_pixels, MAX_IMAGE_PIXELS))))
        free_pixels -= contents[-1].pixels
    return contents


class ContentRenderer:
    """Images and sounds of the conversations that a chat template renders.

    markers       of the kinds that the template renders
    placeholders  tokens whose embeddings come from contents
    """

    def __init__(
        self,
        form: ContentForm = "any",
        markers: Mapping[ContentKind, str] | None = None,
        placeholders: frozenset[int] = frozenset(),
    ) -> None:
        self.markers = markers or {}
        self.form, self._placeholders = form, placeholders
        self._kinds = {marker: kind for kind, marker in self.markers.items()}
        pattern = "|".join(map(re.escape, sorted(self._kinds, key=len, reverse=True)))
        self._pattern = re.compile(f"(?<!{TEXT_MARK})(?:{pattern or '(?!)'})")

    def arrange(self, messages: Messages) -> Messages:
        """The messages in the form that the template reads."""
        if self.form == "any":
            return messages
        convert = as_parts if self.form == "parts" else self._flatten
        return [
            {**message, "content": convert(message["content"])} if "content" in message else message
            for message in messages
        ]

    def in_order(self, text: str, contents: Sequence[ProcessedContent]) -> list[ProcessedContent]:
        """The contents in the order of their markers in a text. Raises InvalidRequest if it has not one for each."""
        queues = {kind: deque(content for content in contents if content.kind == kind) for kind in self.markers}
        kinds = [self._kinds[match.group()] for match in self._pattern.finditer(text)]
        counts = Counter(content.kind for content in contents)
        if Counter(kinds) != counts:
            reason = f"the model's chat template renders {len(kinds)} of {counts.total()} images and sounds"
            raise InvalidRequest("messages", reason)
        return [queues[kind].popleft() for kind in kinds]

    def expand(self, text: str, ordered: Sequence[ProcessedContent]) -> str:
        """The text of some messages with the replacements of its contents, the first ones of `ordered`."""
        replacements = iter(ordered)
        return self._pattern.sub(lambda match: _replacement(replacements, match.group()), text)

    def locate(
        self, tokens: Sequence[int], ordered: Sequence[ProcessedContent], encode: Callable[[str], list[int]]
    ) -> tuple[Content, ...]:
        """The contents with their prompt tokens. Raises InvalidRequest for placeholders of no content."""
        positions = iter([index for index, token in enumerate(tokens) if token in self._placeholders])
        located = []
        for content in ordered:
            count = sum(token in self._placeholders for token in encode(content.replacement))
            indices = [index for _, index in zip(range(count), positions, strict=False)]
            if not indices or len(indices) < count:
                raise InvalidRequest("messages", "the model's tokenizer does not keep the placeholders of a content")
            located.append(Content(content.kind, indices[0], indices[-1] + 1, content.digest, content.arrays))
        if next(positions, None) is not None:
            raise InvalidRequest("messages", "the model's chat template writes placeholders of no content")
        return tuple(located)

    def _flatten(self, content: object) -> object:
        return flatten(content, {str(kind): marker for kind, marker in self.markers.items()})


def _replacement(contents: Iterator[ProcessedContent], marker: str) -> str:
    content = next(contents, None)
    return marker if content is None else content.replacement


def detect_form(kind: ContentKind, marker: str, render: Callable[[Messages], str]) -> ContentForm | None:
    """The form in which a chat template renders contents of a kind, by samples of one and two; None if it does not."""
    if all(_count(marker, render, [*[{"type": kind}] * count, _text_part()]) == count for count in (1, 2)):
        return "parts"
    if all(_count(marker, render, marker * count + _SAMPLE_TEXT) == count for count in (1, 2)):
        return "text"
    return None


def _text_part() -> dict[str, object]:
    return {"type": "text", "text": _SAMPLE_TEXT}


def _count(marker: str, render: Callable[[Messages], str], content: object) -> int | None:
    """The markers in a rendered sample; None if the template refuses it, or leaves out its text."""
    text = _rendered_sample(render, content)
    return None if text is None else text.count(marker)


def needs_parts(render: Callable[[Messages], str]) -> bool:
    """Whether a chat template leaves out texts that are not parts of a content."""
    return _rendered_sample(render, _SAMPLE_TEXT) is None and _rendered_sample(render, [_text_part()]) is not None


def _rendered_sample(render: Callable[[Messages], str], content: object) -> str | None:
    """A rendered message; None if the template refuses it, or does not write its text."""
    try:
        text = render([{"role": "user", "content": content}])
    except TEMPLATE_ERRORS:
        return None
    # The type of a part is written if a list becomes text as a whole.
    return text if _SAMPLE_TEXT in text and "'type'" not in text else None
