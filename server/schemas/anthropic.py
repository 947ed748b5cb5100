"""Requests of Anthropic's /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.schemas import policy
from server.schemas.common import Count, Label, StopString
from server.schemas.content import Object, Strict
from server.schemas.media import FileName, ImageAddress, InlineImage
from server.schemas.response_input import kind_of
from server.schemas.tools import MAX_TOOLS, Beside, FunctionName, Schema

MAX_BLOCKS = 2048
TEXTS_ONLY = "this server reads texts here"
TEXTS_AND_IMAGES = "this server reads texts and images, no documents"


class CacheControl(Strict):
    """Cache breakpoint: the end of a prefix that other requests share. `ttl` is accepted without effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheableBlock(Strict):
    """A part that may have a cache breakpoint."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.ANTHROPIC_BLOCK

    cache_control: CacheControl | None = None


def _only_text(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("unsupported_value", TEXTS_ONLY)
    return kind


class TextBlock(CacheableBlock):
    """A text block."""

    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: str


def _shape(content: object) -> str:
    return "blocks" if isinstance(content, list) else "string"


Texts = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Tag("blocks")],
    Discriminator(_shape),
]


class Base64Image(Strict):
    """An image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: InlineImage


class ImageAt(Strict):
    """An image at an https URL of a host of --allow-media-host."""

    type: Literal["url"]
    url: ImageAddress


class ImageFile(Strict):
    """An image in an uploaded file."""

    type: Literal["file"]
    file_id: FileName


class ImageBlock(CacheableBlock):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Image | ImageAt | ImageFile, Field(discriminator="type")]


def _result_kind(block: object) -> str:
    return "image" if kind_of(block) == "image" else "text"


ResultContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("text")] | Annotated[ImageBlock, Tag("image")], Discriminator(_result_kind)
            ]
        ],
        Field(max_length=MAX_BLOCKS),
        Tag("blocks"),
    ],
    Discriminator(_shape),
]


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer. The signature is accepted and not verified."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(CacheableBlock):
    """A tool call."""

    type: Literal["tool_use"]
    id: Label
    name: Label
    input: Object


class ToolResultBlock(CacheableBlock):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: ResultContent | None = None
    is_error: bool | None = None


def _kind(block: object) -> str:
    return str(kind_of(block) or "text")


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind, custom_error_type="unsupported_value", custom_error_message=TEXTS_AND_IMAGES),
]
Blocks = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Block], Field(max_length=MAX_BLOCKS), Tag("blocks")],
    Discriminator(_shape),
]


class AnthropicMessage(Strict):
    """A message. Tool results are part of user messages."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def _own(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError("unsupported_value", "this server has no tools, only those of the client")
    return kind


class AnthropicTool(CacheableBlock):
    """Definition of a tool."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.ANTHROPIC_TOOL

    type: Annotated[Literal["custom"], BeforeValidator(_own)] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None


class ToolMode(Strict):
    """Whether tools are called; "any": at least one."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Strict):
    """The tool that must be called. Other fields of its definition are accepted."""

    type: Literal["tool"]
    name: FunctionName
    description: Beside[str] = None
    input_schema: Beside[Schema] = None
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(Strict):
    """Reasoning with at most `budget_tokens`. Display "omitted" hides it."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Strict):
    """Reasoning without a limit."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Strict):
    """No reasoning."""

    type: Literal["disabled"]


class JsonOutput(Strict):
    """The answer is JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Strict):
    """Reasoning effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class AnthropicMetadata(Strict):
    """The end user of the request."""

    user_id: Label | None = None


class CountRequest(Strict):
    """A message request without a limit: the fields of the generation do not change the number of prompt tokens."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.ANTHROPIC

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=2048)]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolMode | NamedTool, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")] | None = (
        None
    )
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessagesRequest(CountRequest):
    """A message request."""

    max_tokens: Count
