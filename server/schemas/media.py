"""Images and sounds in requests: the parts of chats, and the part that parts of all APIs are translated to."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    InstanceOf,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    Tag,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from engine.types.content import ContentKind
from server.schemas import policy
from server.schemas.content import MAX_PARTS, Breakpoint, Strict, TextPart, as_text

# Of an image or a sound, inline or in a file.
MAX_UPLOAD_BYTES = 20 * 2**20
INVALID_URL, INVALID_BASE64, TOO_LARGE = "invalid_image_url", "invalid_base64_image", "image_too_large"
# Parts of other servers, whose bytes or numbers would pass no check.
REFUSED_PARTS = ("audio_url", "video_url", "input_video", "image_embeds", "audio_embeds", "image_pil", "input_file")

# Base64 decoded in one call, about 3 ms: a call holds the interpreter lock, and the event loop waits for it.
_DECODED_CHARACTERS = 2**20
_WHITESPACE = " \t\n\r\f"
_without_whitespace = str.maketrans("", "", _WHITESPACE)
# Parameters, such as a charset, have no meaning for an image.
_data_url = re.compile(r"data:([a-z0-9.+/-]{0,64})(?:;[a-z0-9=._-]{1,64}){0,4};base64,", re.IGNORECASE)

Detail = Literal["auto", "low", "high", "original"]


class InlineMedia:
    """The decoded bytes of a base64 text. No model of pydantic, and no dataclass: a dump of a part has it unchanged.

    media_type  as declared, in lower case; "": not declared
    characters  of the text in the body
    """

    __slots__ = ("characters", "data", "media_type")

    def __init__(self, data: bytes, media_type: str = "", characters: int = 0) -> None:
        self.data, self.media_type, self.characters = data, media_type, characters


@dataclass(frozen=True, slots=True)
class FileId:
    """An uploaded file."""

    id: str


# Bytes, an https URL, or an uploaded file.
MediaSource = InlineMedia | str | FileId


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or a sound between texts.

    kind    None: a file's, as its bytes tell
    member  its source in the part of the request, such as "image_url.url", for errors
    field   the whole path of the source, where the message of the chat has another position in the request; else ""
    """

    kind: ContentKind | None
    source: MediaSource
    member: str
    detail: Detail = "auto"
    prompt_cache_breakpoint: Breakpoint | None = None
    field: str = ""
    type: Literal["media"] = "media"


def decode_base64(text: str, media_type: str = "", offset: int = 0, *, error: str = INVALID_BASE64) -> InlineMedia:
    """The bytes of base64 from a position on, without its ASCII whitespace, as browsers decode it; a validation error
    for any other character, or too many bytes.
    """
    characters = len(text) - offset
    if any(space in text for space in _WHITESPACE):
        text, offset = "".join(piece.translate(_without_whitespace) for piece in _pieces(text, offset)), 0
    size = (len(text) - offset) // 4 * 3 - text.endswith("=") - text.endswith("==")
    if size > MAX_UPLOAD_BYTES:
        raise PydanticCustomError(TOO_LARGE, f"it has {size} bytes, and at most {MAX_UPLOAD_BYTES} are read")
    try:
        data = b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in _pieces(text, offset))
    except ValueError:
        raise PydanticCustomError(error, "it is not base64") from None
    # Padding before the end of the text ends a piece early.
    if len(data) != size:
        raise PydanticCustomError(error, "it is not base64")
    if not data:
        raise PydanticCustomError(error, "it is empty")
    return InlineMedia(data, media_type.lower(), characters)


def _pieces(text: str, offset: int) -> Iterator[str]:
    for start in range(offset, len(text), _DECODED_CHARACTERS):
        yield text[start : start + _DECODED_CHARACTERS]


def image_url(value: object) -> InlineMedia | str:
    """The bytes of a data URL, or an https URL; a validation error for any other one."""
    if isinstance(value, InlineMedia):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    match = _data_url.match(value)
    if match:
        return decode_base64(value, match[1], match.end())
    if not value[:8].lower().startswith("https://"):
        raise PydanticCustomError(INVALID_URL, "it must be a data URL with base64, or an https URL")
    return value


def inline_image(value: object) -> InlineMedia:
    """The bytes of an image in base64, without a data URL; a validation error."""
    return _inline(value, INVALID_BASE64)


def inline_audio(value: object) -> InlineMedia:
    """The bytes of a sound in base64; a validation error."""
    return _inline(value, "invalid_value")


def _inline(value: object, error: str) -> InlineMedia:
    if isinstance(value, InlineMedia):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    return decode_base64(value, error=error)


_AS_IT_IS = PlainSerializer(lambda media: media)
ImageAddress = Annotated[InlineMedia | str, PlainValidator(image_url, json_schema_input_type=str), _AS_IT_IS]
InlineImage = Annotated[InlineMedia, PlainValidator(inline_image, json_schema_input_type=str), _AS_IT_IS]
InlineAudio = Annotated[InlineMedia, PlainValidator(inline_audio, json_schema_input_type=str), _AS_IT_IS]
FileName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class ImageUrl(Strict):
    """An image: a data URL with base64, or an https URL of a host of --allow-media-host."""

    url: ImageAddress
    detail: Detail | None = None


class _ChatPart(Strict):
    hints: ClassVar[Mapping[str, str]] = policy.PART_HINTS

    prompt_cache_breakpoint: Breakpoint | None = None


class ImageUrlPart(_ChatPart):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class AudioData(Strict):
    """A sound in base64."""

    data: InlineAudio
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "mpeg", "mpga"]


class InputAudioPart(_ChatPart):
    """A sound."""

    type: Literal["input_audio"]
    input_audio: AudioData


class UploadedFile(Strict):
    """A file of /v1/files with the purpose vision or user_data."""

    file_id: FileName


class FilePart(_ChatPart):
    """An image or a sound in an uploaded file."""

    type: Literal["file"]
    file: UploadedFile


def media_part(part: ImageUrlPart | InputAudioPart | FilePart | MediaPart) -> MediaPart:
    """The part that parts of all APIs are translated to."""
    mark = part.prompt_cache_breakpoint
    match part:
        case MediaPart():
            return part
        case ImageUrlPart(image_url=image):
            return MediaPart("image", image.url, "image_url.url", image.detail or "auto", mark)
        case InputAudioPart(input_audio=audio):
            return MediaPart("audio", audio.data, "input_audio.data", prompt_cache_breakpoint=mark)
        case FilePart(file=file):
            return MediaPart(None, FileId(file.file_id), "file.file_id", prompt_cache_breakpoint=mark)


def refuse_kind(kind: object) -> NoReturn:
    """Raise the validation error for a part of another kind."""
    named = f"there is no '{kind}'" if kind in REFUSED_PARTS else "it is no kind of part"
    raise PydanticCustomError("unsupported_value", f"{named}; this server reads texts, images and sounds")


def _only_text(kind: object) -> object:
    if isinstance(kind, str) and kind not in ("text", "thinking"):
        refuse_kind(kind)
    return kind


class ChatTextPart(TextPart):
    """A text part, or the reasoning of an assistant's message."""

    type: Annotated[Literal["text", "thinking"], BeforeValidator(_only_text)]


def _kind(part: object) -> str:
    if isinstance(part, MediaPart):
        return "media"
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return kind if kind in ("image_url", "input_audio", "file") else "text"


ChatPart = Annotated[
    Annotated[ChatTextPart, Tag("text")]
    | Annotated[ImageUrlPart, Tag("image_url")]
    | Annotated[InputAudioPart, Tag("input_audio")]
    | Annotated[FilePart, Tag("file")]
    | Annotated[SkipJsonSchema[InstanceOf[MediaPart]], Tag("media")],
    Discriminator(_kind),
]


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


ChatContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[Annotated[ChatPart, BeforeValidator(as_text)]], Field(max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_shape),
]


def inline_characters(value: Any) -> int:
    """The characters of base64 in a validated body."""
    match value:
        case InlineMedia(characters=characters):
            return characters
        case MediaPart(source=source):
            return inline_characters(source)
        case Strict():
            return sum(map(inline_characters, vars(value).values()))
        case list():
            return sum(map(inline_characters, value))
    return 0
