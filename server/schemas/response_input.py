"""Input of /v1/responses: a text, or items. Output items of a response are accepted as input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.schemas import policy
from server.schemas.common import Label
from server.schemas.content import MAX_PARTS, Breakpoint, Object, Strict
from server.schemas.media import AudioData, Detail, FileName, ImageAddress

MAX_ITEMS = 2048
# One per token.
MAX_TOKEN_LOGPROBS = 65536

Status = Literal["in_progress", "completed", "incomplete"]


def kind_of(value: object) -> object:
    """The `type` of a part, as a dict or as a validated model: discriminators are called with both."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class InputTextPart(Strict):
    """A text part."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputTextPart(Strict):
    """A text part of an earlier response. Its other fields are accepted and ignored."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Object], Field(max_length=MAX_TOKEN_LOGPROBS)] | None = None
    logprobs: Annotated[list[Object], Field(max_length=MAX_TOKEN_LOGPROBS)] | None = None


class RefusalPart(Strict):
    """A refusal of a model."""

    type: Literal["refusal"]
    refusal: str


class InputImagePart(Strict):
    """An image: a data URL, an https URL of a host of --allow-media-host, or an uploaded file."""

    type: Literal["input_image"]
    image_url: ImageAddress | None = None
    file_id: FileName | None = None
    detail: Detail | None = None
    prompt_cache_breakpoint: Breakpoint | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> InputImagePart:
        if (self.image_url is None) == (self.file_id is None):
            raise PydanticCustomError("invalid_value", "give one of 'image_url' and 'file_id'")
        return self


class InputSoundPart(Strict):
    """A sound."""

    type: Literal["input_audio"]
    input_audio: AudioData
    prompt_cache_breakpoint: Breakpoint | None = None


class InputFilePart(Strict):
    """An image or a sound in an uploaded file."""

    type: Literal["input_file"]
    file_id: FileName
    prompt_cache_breakpoint: Breakpoint | None = None


def _part(part: object) -> str:
    kind = kind_of(part)
    return kind if isinstance(kind, str) else "input_text"


Part = Annotated[
    Annotated[InputTextPart, Tag("input_text")]
    | Annotated[OutputTextPart, Tag("output_text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[InputImagePart, Tag("input_image")]
    | Annotated[InputSoundPart, Tag("input_audio")]
    | Annotated[InputFilePart, Tag("input_file")],
    Discriminator(
        _part,
        custom_error_type="unsupported_value",
        custom_error_message="this server reads texts, images and sounds, no other parts",
    ),
]


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


Parts = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_shape),
]


class MessageInput(Strict):
    """A message of any role."""

    type: Literal["message"] = "message"
    id: Label | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallInput(Strict):
    """A function call."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_CALL

    type: Literal["function_call"]
    id: Label | None = None
    call_id: Label
    name: Label
    namespace: Label | None = None
    arguments: str
    status: Status | None = None


class CallOutputInput(Strict):
    """The result of a function call."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_CALL

    type: Literal["function_call_output"]
    id: Label | None = None
    call_id: Label
    output: Parts
    name: Label | None = None
    status: Status | None = None


class CustomCallInput(Strict):
    """A custom tool call."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_CALL

    type: Literal["custom_tool_call"]
    id: Label | None = None
    call_id: Label
    name: Label
    input: str
    status: Status | None = None


class CustomOutputInput(Strict):
    """The result of a custom tool call."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_CALL

    type: Literal["custom_tool_call_output"]
    id: Label | None = None
    call_id: Label
    output: Parts
    status: Status | None = None


class SummaryText(Strict):
    """A reasoning summary of another server. It is not part of the prompt."""

    type: Literal["summary_text"]
    text: str


class ReasoningTextInput(Strict):
    """A part of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(Strict):
    """Reasoning before an answer: in `content`, or encoded by this server."""

    type: Literal["reasoning"]
    id: Label | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningTextInput], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class CompactionInput(Strict):
    """A conversation compacted by /v1/responses/compact."""

    type: Literal["compaction"]
    id: Label | None = None
    encrypted_content: str
    status: Status | None = None


class ReferenceInput(Strict):
    """A reference to a stored item."""

    type: Literal["item_reference"] = "item_reference"
    id: Label


def _kind(item: object) -> str:
    kind = kind_of(item)
    if isinstance(kind, str):
        return kind
    return "item_reference" if isinstance(item, dict) and "role" not in item else "message"


InputItem = Annotated[
    Annotated[MessageInput, Tag("message")]
    | Annotated[CallInput, Tag("function_call")]
    | Annotated[CallOutputInput, Tag("function_call_output")]
    | Annotated[CustomCallInput, Tag("custom_tool_call")]
    | Annotated[CustomOutputInput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")]
    | Annotated[CompactionInput, Tag("compaction")]
    | Annotated[ReferenceInput, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_value",
        custom_error_message="this server has messages, tools, reasoning and compactions, no items of this type",
    ),
]


def _named(item: Any) -> Any:
    """An item with its type, which OpenAI allows to be absent or null."""
    return {**item, "type": _kind(item)} if isinstance(item, dict) and item.get("type") is None else item


Input = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[Annotated[InputItem, BeforeValidator(_named)]], Field(min_length=1, max_length=MAX_ITEMS), Tag("parts")
    ],
    Discriminator(_shape),
]
