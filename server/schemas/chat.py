"""POST /v1/chat/completions: the request, the answer and the chunks of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.common import (
    AnsweredTier,
    Count,
    FinishReason,
    Generation,
    Label,
    PromptLogprobs,
    PromptProgress,
    TimingsBody,
    UsageBody,
)
from server.schemas.content import Content, Strict
from server.schemas.tools import (
    MOST_TOOLS,
    CalledFunction,
    Choice,
    LegacyChoice,
    LegacyFunction,
    ToolCall,
    ToolDefinition,
)

# Names that the renderer passes to the template itself.
_RESERVED = (
    "messages tools documents chat_template tokenize add_generation_prompt continue_final_message conversation "
    "bos_token eos_token pad_token unk_token return_dict return_tensors return_assistant_tokens_mask padding "
    "truncation max_length tokenizer_kwargs tokenizer raise_exception strftime_now"
)
RESERVED_ARGUMENTS = frozenset(_RESERVED.split())

LONGEST_ARGUMENT = 1024


def _own(name: str) -> str:
    if name in RESERVED_ARGUMENTS:
        raise PydanticCustomError("invalid_value", "this name belongs to the template itself")
    return name


def _scalar(value: object) -> object:
    if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > LONGEST_ARGUMENT):
        raise PydanticCustomError("invalid_value", "it must be a number, a boolean, null or a short string")
    return value


ArgumentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$"), BeforeValidator(_own)]
ArgumentValue = Annotated[bool | int | float | str | None, BeforeValidator(_scalar)]


class Message(Strict):
    """One message. What an answer holds may come back in the history, so its empty fields are accepted."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class CacheOptions(Strict):
    """Where prompts are worth keeping: "explicit" means at the breakpoints alone. `ttl` is a wish."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(Generation):
    """What a client asks of a chat."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {**policy.EXTENSIONS, **policy.CHAT}

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[LegacyFunction], Field(max_length=MOST_TOOLS)] | None = None
    function_call: LegacyChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: Annotated[dict[ArgumentName, ArgumentValue], Field(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_cache_diagnostics: bool | None = None


class TopLogprob(TypedDict):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that was chosen, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token of the text beside it."""

    content: list[ChatLogprob]
    refusal: None


class AnsweredFunction(TypedDict):
    """What is called, its arguments as JSON text."""

    name: str
    arguments: str


class AnsweredCustom(TypedDict):
    """A custom tool, and the text that it is given."""

    name: str
    input: str


class AnsweredCall(TypedDict):
    """A call of a tool: of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[AnsweredFunction]
    custom: NotRequired[AnsweredCustom]


class AnswerMessage(TypedDict):
    """The answer itself. `content` is null where there is nothing but calls; `reasoning` is another name."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredCall]]
    function_call: NotRequired[AnsweredFunction]


class ChatChoice(TypedDict):
    """One answer. `stop_reason` is the stop string or token that ended it, if one of the request's did."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class PromptCacheDiagnostics(TypedDict):
    """How much of a prompt was found in the cache, and why not more of it.

    reason  null: all was found that ever can be, which is all but its last token
            "bypassed"     the request does not use the cache
            "scored"       it asked for what must be computed, such as log-probabilities of its prompt
            "unreachable"  more was remembered, but not all that it takes to go on there
            "unknown"      nothing that begins like it was remembered of its owner, under its `cache_salt`
            "diverged"     what was remembered goes on differently
            "ended"        what was remembered ends there: the rest is new, or was given up for others
    first_divergent_token    where what was remembered ends; null: it reaches to the end, or was not looked for
    first_divergent_message  the message that it stands in or behind; null: it stands before the first one's text
    """

    cached_tokens: int
    missed_tokens: int
    reason: Literal["bypassed", "scored", "unreachable", "unknown", "diverged", "ended"] | None
    first_divergent_token: int | None
    first_divergent_message: int | None


class ChatCompletion(TypedDict):
    """An answer in one piece."""

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
    """The name once, then pieces of the arguments."""

    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    """The name once, then pieces of the input."""

    name: NotRequired[str]
    input: str


class CallDelta(TypedDict):
    """What a chunk adds to call number `index`: first its id, type and name, then its arguments or its input."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class ChatDelta(TypedDict):
    """What a chunk adds: the role once, then reasoning, text and calls, then nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]
    function_call: NotRequired[FunctionDelta]


class ChunkChoice(TypedDict):
    """The part of a chunk that belongs to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a stream. `usage` is there if it was asked for: null but in the last chunk, which has no choices.

    `warnings`, `prompt_token_ids` and what else begins with `prompt_` stand in the first chunk that they are known in.
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
