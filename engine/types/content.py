"""Images and sounds of a prompt: as a request sends them, and as the model's processor prepares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types.array import Array

ContentKind = Literal["image", "audio"]
ImageDetail = Literal["auto", "low", "high"]
# Of an image, and of all images of a request: about 2 s and 8 s of processor time.
MAX_IMAGE_PIXELS = 2**26
MAX_REQUEST_PIXELS = 4 * MAX_IMAGE_PIXELS


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a request, not decoded.

    field       where the request has it, for errors, such as "messages[1].content[0].image_url.url"
    detail      of an image: a hint for the size that the model sees
    max_pixels  of an image: what earlier images leave of MAX_REQUEST_PIXELS, if less than MAX_IMAGE_PIXELS
    """

    kind: ContentKind
    data: bytes
    field: str
    detail: ImageDetail = "auto"
    max_pixels: int = MAX_IMAGE_PIXELS


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
