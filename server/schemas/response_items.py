"""What an answer of /v1/responses is made of, and the events that tell it piece by piece."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.schemas.chat import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    """What is said to the user. Nothing annotates it; log-probabilities are there if they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[ChatLogprob]


class ReasoningText(TypedDict):
    """What the model said before its answer."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """The model's reasoning. `encrypted_content` is there if it was asked for: the same, to be sent back."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class CallItem(TypedDict):
    """A call of a function, its arguments as JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomCallItem(TypedDict):
    """A call of a custom tool, and the text that it is given."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class CompactionItem(TypedDict):
    """A conversation in short, to be sent back in its place."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(TypedDict):
    """Of the input's tokens, those that were found in the cache, and those that were computed into it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Of the output's tokens, those of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """What a response cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ReasoningConfig(TypedDict):
    """How much is reasoned. Nothing is ever summarised."""

    effort: str | None
    summary: None


MissReason = Literal[
    "model_changed",
    "tools_changed",
    "text_format_changed",
    "reasoning_effort_changed",
    "verbosity_changed",
    "input_changed",
]


class CacheDiagnostics(TypedDict):
    """Why a prompt was, or was not, in the cache, beside an earlier response. Of a miss: why, and how much of it.

    cache_missed_tokens         of the prompt, behind the first difference
    comparison_reusable_tokens  before it: the number of the first token that differs
    """

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[MissReason]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]


class ResponseBody(TypedDict):
    """A response, finished or not. What a request may set comes back as it is in force."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_options: NotRequired[dict[str, object]]
    prompt_cache_diagnostics: NotRequired[CacheDiagnostics]
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: str
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, object]
    tool_choice: str | dict[str, object]
    tools: list[dict[str, object]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    warnings: NotRequired[list[str]]


class LifecycleEvent(TypedDict):
    """The response as a whole: at its beginning, when work on it begins, and at its end."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseBody


class ItemEvent(TypedDict):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(TypedDict):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextEvent(TypedDict):
    """More text of a part (`delta`), or all of it (`text`). Log-probabilities belong to output text only."""

    type: Literal[
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
    ]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ChatLogprob]]


class ArgumentsEvent(TypedDict):
    """More of a call's arguments (`delta`), or all of them (`arguments`)."""

    type: Literal["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: NotRequired[str]
    arguments: NotRequired[str]


class InputEvent(TypedDict):
    """More of what a custom tool is given (`delta`), or all of it (`input`)."""

    type: Literal["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: NotRequired[str]
    input: NotRequired[str]


class ErrorEvent(TypedDict):
    """What broke the stream: flat as OpenAI documents it, and nested as it sends it."""

    type: Literal["error"]
    sequence_number: int
    code: str
    message: str
    param: str | None
    error: dict[str, object]


ResponseEvent = LifecycleEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent | InputEvent | ErrorEvent


class Compaction(TypedDict):
    """What a conversation becomes: its system messages as they were, and the rest in short."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, object] | CompactionItem]
    usage: ResponseUsage


class ResponseDeleted(TypedDict):
    """A response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """A page of what a response was made from."""

    object: Literal["list"]
    data: list[dict[str, object]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseInputTokens(TypedDict):
    """The tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int
