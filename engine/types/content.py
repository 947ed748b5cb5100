"""Images and sounds of a prompt: as a request sends them, and as the model's processor prepares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types.array import Array

ContentKind = Literal["image", "audio"]
ImageDetail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a request, not decoded.

    field   where the request has it, for errors, such as "messages[1].content[0].image_url.url"
    detail  of an image: a hint for the size that the model sees
    """

    kind: ContentKind
    data: bytes
    field: str
    detail: ImageDetail = "auto"


@dataclass(frozen=True, slots=True)
class Content:
    """An image or a sound in the prompt.

    start, stop  its prompt tokens [start, stop): placeholders and the tokens around them that the processor writes
    digest       SHA-256 of the arrays, and of all that decides its rows; with the owner's salt, the key of its entry
    arrays       inputs of the model, by name, as its processor returns them for this content alone
    """

    kind: ContentKind
    start: int
    stop: int
    digest: bytes
    arrays: tuple[tuple[str, Array], ...]
