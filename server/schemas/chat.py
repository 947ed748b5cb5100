"""POST /v1/chat/completions: the request, the response and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.common import (
    AnsweredTier,
    FinishReason,
    Generation,
    Label,
    PromptLogprobs,
    PromptProgress,
    TimingsBody,
    TokenLimit,
    UsageBody,
)
from server.schemas.content import Strict
from server.schemas.media import ChatContent
from server.schemas.tools import (
    MAX_TOOLS,
    CalledFunction,
    Choice,
    LegacyChoice,
    LegacyFunction,
    ToolCall,
    ToolDefinition,
)

# Variables that the renderer sets itself.
_RESERVED = (
    "messages tools documents chat_template tokenize add_generation_prompt continue_final_message conversation "
    "bos_token eos_token pad_token unk_token return_dict return_tensors return_assistant_tokens_mask padding "
    "truncation max_length tokenizer_kwargs tokenizer raise_exception strftime_now"
)
RESERVED_ARGUMENTS = frozenset(_RESERVED.split())

MAX_ARGUMENT_LENGTH = 1024


def _own(name: str) -> str:
    if name in RESERVED_ARGUMENTS:
        raise PydanticCustomError("invalid_value", "this name belongs to the template itself")
    return name


def _scalar(value: object) -> object:
    if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > MAX_ARGUMENT_LENGTH):
        raise PydanticCustomError("invalid_value", "it must be a number, a boolean, null or a short string")
    return value


ArgumentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$"), BeforeValidator(_own)]
ArgumentValue = Annotated[bool | int | float | str | None, BeforeValidator(_scalar)]


class Message(Strict):
    """A message. Unset fields of a response are accepted when it is sent back as history."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.MESSAGE
    hints: ClassVar[Mapping[str, str]] = policy.MESSAGE_HINTS
    drops_unknown: ClassVar[bool] = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: ChatContent | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class CacheOptions(Strict):
    """Prompt caching: "explicit" caches at breakpoints only. `ttl` is accepted without effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ReasoningBudget = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ThinkingOptions(Strict):
    """The switch for reasoning of DeepSeek, GLM, Kimi and Anthropic."""

    drops_unknown: ClassVar[bool] = True

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: ReasoningBudget | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningOptions(Strict):
    """Reasoning by OpenRouter's names: `exclude` leaves it out of the answer."""

    hints: ClassVar[Mapping[str, str]] = policy.REASONING_HINTS

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: ReasoningBudget | None = None
    exclude: bool | None = None


class ChatRequest(Generation):
    """A chat completion request."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {**policy.EXTENSIONS, **policy.CHAT}
    hints: ClassVar[Mapping[str, str]] = policy.CHAT_HINTS

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: TokenLimit = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[LegacyFunction], Field(max_length=MAX_TOOLS)] | None = None
    function_call: LegacyChoice | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: ReasoningBudget | None = None
    thinking_budget_tokens: ReasoningBudget | None = None
    thinking_budget: ReasoningBudget | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: Annotated[dict[ArgumentName, ArgumentValue], Field(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_cache_diagnostics: bool | None = None


class TopLogprob(TypedDict):
    """Log-probability of a token; `bytes` is null for tokens that the text leaves out."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """Log-probability of the sampled token, and of the top tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry per token of the text."""

    content: list[ChatLogprob]
    refusal: None


class AnsweredFunction(TypedDict):
    """Name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCustom(TypedDict):
    """Name and input of a called custom tool."""

    name: str
    input: str


class AnsweredCall(TypedDict):
    """A tool call, of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[AnsweredFunction]
    custom: NotRequired[AnsweredCustom]


class AnswerMessage(TypedDict):
    """The answer. `content` is null if there are only tool calls; `reasoning` is an alias of `reasoning_content`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredCall]]
    function_call: NotRequired[AnsweredFunction]


class ChatChoice(TypedDict):
    """One choice. `stop_reason` is the matched stop string or stop token of the request, if any."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class PromptCacheDiagnostics(TypedDict):
    """Prefix cache hit of a prompt, and the reason for a partial hit.

    reason  null: the complete prompt was cached, except its last token, which is always computed
            "bypassed"     the request does not use the cache
            "scored"       the request needs computed tokens, such as for log-probabilities of its prompt
            "unreachable"  a longer prefix was found, but its state cannot be restored there
            "unknown"      no prefix of it was cached for its owner and `cache_salt`
            "diverged"     the cached tokens differ from there on
            "ended"        the cached tokens end there: the rest is new, or was evicted
    first_divergent_token    end of the cached prefix; null: it covers the prompt, or was not looked up
    first_divergent_message  message that contains or precedes it; null: it is before the text of the first message
    """

    cached_tokens: int
    missed_tokens: int
    reason: Literal["bypassed", "scored", "unreachable", "unknown", "diverged", "ended"] | None
    first_divergent_token: int | None
    first_divergent_message: int | None


class ChatCompletion(TypedDict):
    """A chat completion response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: AnsweredTier
    system_fingerprint: str
    timings: NotRequired[TimingsBody]
    metadata: NotRequired[dict[str, str]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_cache_diagnostics: NotRequired[PromptCacheDiagnostics]
    warnings: NotRequired[list[str]]


class FunctionDelta(TypedDict):
    """The name once, then parts of the arguments."""

    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    """The name once, then parts of the input."""

    name: NotRequired[str]
    input: str


class CallDelta(TypedDict):
    """A delta of tool call number `index`: first its id, type and name, then its arguments or its input."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class ChatDelta(TypedDict):
    """A delta of a chunk: the role once, then reasoning, text and tool calls; empty in the finish chunk."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChunkChoice(TypedDict):
    """The part of a chunk that belongs to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """A chunk of a stream. `usage` is present if requested: null except in the last chunk, which has no choices.

    `warnings`, `prompt_token_ids` and other `prompt_` fields are in the first chunk where they are available; `seed` is
    in the first chunk of a stream that can be resumed.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: AnsweredTier
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[UsageBody | None]
    timings: NotRequired[TimingsBody]
    prompt_progress: NotRequired[PromptProgress]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_cache_diagnostics: NotRequired[PromptCacheDiagnostics]
    warnings: NotRequired[list[str]]
    seed: NotRequired[int]
