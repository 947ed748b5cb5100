"""Requests of /v1/responses, /v1/responses/input_tokens and /v1/responses/compact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from server.schemas import policy
from server.schemas.chat import ArgumentName, ArgumentValue, CacheOptions
from server.schemas.common import (
    Count,
    Label,
    MetadataKey,
    MetadataValue,
    ServiceTier,
    SpeculationOptions,
    Stops,
    TokenLimit,
)
from server.schemas.content import IgnoredFields, Object, Strict
from server.schemas.response_input import Input, kind_of
from server.schemas.structure import FormatName
from server.schemas.tools import MAX_TOOLS, Beside, FunctionName, GrammarDefinition, Schema, TextInput
from server.schemas.tools import kind_of as custom_or_function

Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _ours(kind: object) -> object:
    if isinstance(kind, str) and kind not in ("function", "custom"):
        message = "this server calls functions, custom tools and namespaces of functions, no other kind of tool"
        raise PydanticCustomError("unsupported_value", message)
    return kind


FunctionKind = Annotated[Literal["function"], BeforeValidator(_ours)]


class ResponseFunctionTool(Strict):
    """A function tool. Its schema is enforced exactly unless `strict` is false, as in OpenAI's API."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_TOOL

    type: FunctionKind
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class GrammarFormat(GrammarDefinition):
    """Text that follows a grammar."""

    type: Literal["grammar"]


class ResponseCustomTool(Strict):
    """A custom tool with text input."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_TOOL

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[TextInput | GrammarFormat, Field(discriminator="type")] | None = None


class NamespaceTool(Strict):
    """Functions in a group, as Codex sends them. Calls name the group and the function."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[ResponseFunctionTool], Field(min_length=1, max_length=MAX_TOOLS)]


def _tool_kind(value: object) -> str:
    return "a_namespace" if kind_of(value) == "namespace" else custom_or_function(value)


AnyTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("a_function")]
    | Annotated[ResponseCustomTool, Tag("a_custom")]
    | Annotated[NamespaceTool, Tag("a_namespace")],
    Discriminator(_tool_kind),
]
OWN_TOOLS = ("function", "custom", "namespace")


def _without_hosted(tools: object, info: ValidationInfo) -> object:
    """With --lenient, the tools without tools that run at OpenAI, such as web search."""
    if not isinstance(tools, list) or not isinstance(info.context, IgnoredFields) or not info.context.lenient:
        return tools
    hosted = [tool for tool in tools if isinstance(tool, dict) and tool.get("type", "function") not in OWN_TOOLS]
    info.context.left_out.extend((tool, "type", "") for tool in hosted)
    return [tool for tool in tools if not any(tool is other for other in hosted)]


Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS), BeforeValidator(_without_hosted)]


class FunctionChoice(Strict):
    """A function by name. Other fields of its definition are accepted."""

    type: FunctionKind
    name: FunctionName
    description: Beside[str] = None
    parameters: Beside[Schema] = None
    strict: Beside[bool] = None


class CustomChoice(Strict):
    """A custom tool by name. Other fields of its definition are accepted."""

    type: Literal["custom"]
    name: FunctionName
    description: Beside[str] = None
    format: Beside[Object] = None


ToolNamed = Annotated[
    Annotated[FunctionChoice, Tag("a_function")] | Annotated[CustomChoice, Tag("a_custom")],
    Discriminator(custom_or_function),
]


class AllowedFunctions(Strict):
    """Restriction to some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolNamed], Field(min_length=1, max_length=MAX_TOOLS)]


def _choice(value: object) -> str:
    if isinstance(value, str):
        return "mode"
    return "allowed" if kind_of(value) == "allowed_tools" else custom_or_function(value)


FunctionChoices = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[FunctionChoice, Tag("a_function")]
    | Annotated[CustomChoice, Tag("a_custom")]
    | Annotated[AllowedFunctions, Tag("allowed")],
    Discriminator(_choice),
]


class PlainFormat(Strict):
    """Unconstrained text."""

    type: Literal["text"]


class JsonFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Strict):
    """JSON that follows a schema, with or without `strict`."""

    type: Literal["json_schema"]
    name: FormatName
    schema_: Annotated[Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """Format of the answer."""

    format: Annotated[PlainFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """Reasoning effort. There are no summaries."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_REASONING
    hints: ClassVar[Mapping[str, str]] = policy.REASONING_HINTS

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponseCacheOptions(CacheOptions):
    """Cache options as in chat requests, and the response to compare the prompt with."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSE_CACHE

    comparison_response_id: Label | None = None


class ResponseStreamOptions(Strict):
    """Obfuscation is accepted and not applied."""

    include_obfuscation: bool | None = None


class PromptFields(Strict):
    """Fields that determine the prompt. null is the same as absent."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSES
    hints: ClassVar[Mapping[str, str]] = policy.RESPONSE_HINTS

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    tools: Tools | None = None
    tool_choice: FunctionChoices | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: Annotated[dict[ArgumentName, ArgumentValue], Field(max_length=16)] | None = None


class ForkPoint(Strict):
    """A stored response, and how many of its output tokens the answer begins with."""

    response_id: Label
    token_count: Annotated[int, Field(ge=0, le=2**31 - 1)]


class ResponseRequest(PromptFields):
    """A response request. The last fields are extensions, as in chat completions."""

    background: bool | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    max_output_tokens: TokenLimit = None
    max_tool_calls: Count | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: ResponseCacheOptions | None = None
    safety_identifier: Label | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Label | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    speculation: SpeculationOptions | None = None
    continue_from: ForkPoint | None = None

    @property
    def stored(self) -> bool:
        """Whether the response is stored; OpenAI's default is yes."""
        return self.store is not False

    @property
    def compared(self) -> str | None:
        """Id of the response that cache diagnostics compare the prompt with."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id

    def includes(self, what: Include) -> bool:
        """Whether this optional part of the response is requested."""
        return what in (self.include or ())


class CompactRequest(Strict):
    """A conversation to be replaced by a summary; `instructions` precede it as in a response request."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.RESPONSES
    hints: ClassVar[Mapping[str, str]] = policy.RESPONSE_HINTS

    model: str
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    prompt_cache_key: Label | None = None


def plain(model: Strict) -> dict[str, Any]:
    """A part of a request as JSON, without fields that were not set; inline images and sounds stay unchanged."""
    return model.model_dump(by_alias=True, exclude_none=True)
