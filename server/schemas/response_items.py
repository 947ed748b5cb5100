"""Responses and their output items of /v1/responses."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.schemas.chat import ChatLogprob
from server.schemas.common import ContentTokens

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    """A text part. There are no annotations; log-probabilities are included if requested."""

    type: Literal["output_text"]
    text: str
    annotations: list[object]
    logprobs: list[ChatLogprob]


class ReasoningText(TypedDict):
    """A reasoning part."""

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
    """Reasoning of the model. `encrypted_content` is included if requested, for sending it back."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[object]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class CallItem(TypedDict):
    """A function call with its arguments as JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallItem(TypedDict):
    """A custom tool call with its input."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class CompactionItem(TypedDict):
    """A compacted conversation, to be sent back instead of it."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(ContentTokens):
    """Input tokens that were found in the cache, and input tokens that were computed and cached."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Reasoning tokens of the output."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Error of a failed response."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ReasoningConfig(TypedDict):
    """Reasoning effort. There are no summaries."""

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
    """Prefix cache hit of the prompt compared with an earlier response; for a miss, its reason and extent.

    cache_missed_tokens         prompt tokens after the first difference
    comparison_reusable_tokens  prompt tokens before the first difference
    """

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: NotRequired[MissReason]
    cache_missed_tokens: NotRequired[int]
    comparison_reusable_tokens: NotRequired[int]


class ResponseBody(TypedDict):
    """A response, complete or not, with the effective values of the request's parameters."""

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


class Compaction(TypedDict):
    """A compacted conversation: its system messages unchanged, and a summary of the rest."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, object] | CompactionItem]
    usage: ResponseUsage


class ResponseDeleted(TypedDict):
    """Confirmation of a deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInputTokens(TypedDict):
    """Number of prompt tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
