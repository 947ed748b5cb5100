"""What the requests of both APIs share: strict types, sampling, stops, and shapes that both answers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, StringConstraints
from typing_extensions import TypedDict

from engine.types import LONGEST_DRAFT, DrafterChoice, Overflow, RecurrentShift
from server.schemas import policy
from server.schemas.content import Content, Strict

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Label = Annotated[str, StringConstraints(max_length=256)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
# Token ids as JSON keys must be written the one canonical way: no sign, no spaces, no other digits than 0-9.
TokenKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]

Bias = Annotated[float, Field(ge=-100, le=100)]


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[StopString],
    Field(max_length=16),
    BeforeValidator(_one_as_list, json_schema_input_type=str | list[str]),
]


class StreamOptions(Strict):
    """What a stream holds besides the text. Obfuscation is accepted and not applied."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(Strict):
    """A text that much of the answer is expected to repeat; it makes answers faster, never different."""

    type: Literal["content"]
    content: Content


class Speculation(Strict):
    """Who may guess at the answer, and how many tokens at a time; null is what the server was told."""

    drafter: DrafterChoice | None = None
    tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | None = None


class Generation(Strict):
    """The fields that chat and completions share. null means: as if it were not there."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.EXTENSIONS

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    overflow: Overflow | None = None
    keep: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    recurrent_shift: RecurrentShift | None = None
    cache_salt: Annotated[Label, Field(min_length=1)] | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class PromptDetails(TypedDict):
    """Of the tokens of the prompt, those that were not computed."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Tokens of each kind. Accepted are all that were guessed and said, whoever guessed; rejected those not said."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(TypedDict):
    """What an answer cost, in tokens. The last two are there only when the context was shifted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    context_shifts: NotRequired[int]
    shifted_tokens: NotRequired[int]


class TimingsBody(TypedDict):
    """Where the time went, under llama.cpp's names; `prompt_n` counts what was computed, `cache_n` what was not.

    `draft_n` counts tokens that were guessed, `draft_n_accepted` those of them that were said.
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


FinishReason = Literal["stop", "length"]
