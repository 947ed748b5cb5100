"""Fields shared by chat and completion requests, and parts shared by their responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from engine.types.request import MAX_DRAFT_TOKENS, DrafterChoice, Overflow, RecurrentShift
from server.schemas import policy
from server.schemas.content import MAX_TOKENS, Content, Strict
from server.schemas.structure import Choices, Grammar, Regex, ResponseFormat, SchemaOrText, StructuredOutputs

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def unlimited(count: object) -> object:
    """None for -1, which llama.cpp's clients send for an answer without limit."""
    return None if count == -1 and type(count) is int else count


# Maximum tokens of an answer; -1, as in llama.cpp: no limit but the context.
TokenLimit = Annotated[Count | None, BeforeValidator(unlimited)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Label = Annotated[str, StringConstraints(max_length=256)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=256)]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
# Token ids as JSON keys: canonical decimals only, without sign, spaces or non-ASCII digits.
TokenKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]

Bias = Annotated[float, Field(ge=-100, le=100)]
# Choices per prompt; OpenAI's limit is 128, but here each may have to wait for a slot.
MAX_CHOICES = 64


def _not_zero(count: int) -> int:
    if count == 0:
        raise PydanticCustomError("invalid_value", "it must be at least 1, or -1 for as many as the model takes")
    return count


# Maximum tokens of a truncated text; -1: the model's maximum.
Cut = Annotated[Annotated[int, Field(ge=-1, le=2**31 - 1)], AfterValidator(_not_zero)]


def _one_as_list(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("invalid_value", "it must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[StopString],
    Field(max_length=16),
    BeforeValidator(_one_as_list, json_schema_input_type=str | list[str]),
]


def _known_tier(tier: object) -> object:
    if tier == "scale":
        raise PydanticCustomError("unsupported_value", "it must be 'auto', 'default', 'flex' or 'priority'")
    return tier


Patterns = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]],
    Field(max_length=16),
    BeforeValidator(_one_as_list, json_schema_input_type=str | list[str]),
]
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]

ServiceTier = Annotated[Literal["auto", "default", "flex", "priority", "fast"], BeforeValidator(_known_tier)]


class StreamOptions(Strict):
    """Options of a stream. Obfuscation is accepted and not applied."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(Strict):
    """Predicted output, used for speculative decoding; it never changes the answer."""

    type: Literal["content"]
    content: Content


class SpeculationOptions(Strict):
    """Drafter and number of draft tokens; null: the server's setting."""

    drafter: DrafterChoice | None = None
    tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None


class ContinuedAnswer(Strict):
    """The token ids of an answer that a client has already: the stream goes on after them."""

    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


class Generation(Strict):
    """Fields shared by chat and completion requests. null is the same as absent."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.EXTENSIONS

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[Word], Field(max_length=64)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=4096)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: Stops | None = None
    stop_regex: Patterns | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    json_schema: SchemaOrText | None = None
    regex: Regex | None = None
    grammar: Grammar | None = None
    ebnf: Grammar | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    continue_from: ContinuedAnswer | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, le=4096)] | None = None
    truncate_prompt_tokens: Cut | None = None
    request_id: RequestId | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: ServiceTier | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    overflow: Overflow | None = None
    keep: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n_keep: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    recurrent_shift: RecurrentShift | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    cache_prompt: bool | None = None
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far, as in vLLM; requires both options."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ContentTokens(TypedDict):
    """Prompt tokens of images and sounds, if there are any."""

    image_tokens: NotRequired[int]
    audio_tokens: NotRequired[int]


class PromptDetails(ContentTokens):
    """Prompt tokens that were found in the cache, and prompt tokens that were computed and cached."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(TypedDict):
    """Completion tokens by kind. Accepted and rejected are draft tokens of any drafter."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(TypedDict):
    """Token usage. The last two fields are present only if the context was shifted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    context_shifts: NotRequired[int]
    shifted_tokens: NotRequired[int]


class TimingsBody(TypedDict):
    """Timings by llama.cpp's names; `prompt_n` counts computed prompt tokens, `cache_n` cached ones.

    `draft_n` counts draft tokens, `draft_n_accepted` the accepted ones.
    """

    queue_ms: float
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
AnsweredTier = Literal["default", "flex", "priority"]


class PromptProgress(TypedDict):
    """Prefill progress by llama.cpp's names: `total` and `processed` prompt tokens, of which `cache` were cached."""

    total: int
    cache: int
    processed: int
    time_ms: float


class PromptLogprob(TypedDict):
    """Log-probability of a token of the prompt; `rank` 1 is the likeliest, null: not among the returned ones."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
