"""/v1/audio/transcriptions and /v1/audio/translations: fields of the form, and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
Task = Literal["transcribe", "translate"]
# Documented fields that no model here supports, with the reason.
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "chunking_strategy": "a sound is read in windows that follow its segments",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
}


class TranscriptionFields(BaseModel):
    """The fields next to the file; texts of a form, so numbers are converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)] | None = None
    language: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    prompt: str = ""
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    stream: bool = False
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list, alias="timestamp_granularities[]", max_length=2
    )
    include: list[Literal["logprobs"]] = Field(default_factory=list, alias="include[]", max_length=1)


class TranscriptLogprob(TypedDict):
    """A token of the text with its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class InputTokenDetails(TypedDict):
    """Tokens of the sound (positions of the encoder) and of prompts."""

    audio_tokens: int
    text_tokens: int


class TokenUsage(TypedDict):
    """Usage in tokens."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class DurationUsage(TypedDict):
    """Usage in seconds of the sound, rounded up."""

    type: Literal["duration"]
    seconds: int


class Transcription(TypedDict):
    """The response format `json`."""

    text: str
    logprobs: NotRequired[list[TranscriptLogprob]]
    usage: TokenUsage


class TranscriptionSegment(TypedDict):
    """A text with its start and end in seconds.

    seek           frames before its window
    avg_logprob    mean over its tokens
    no_speech_prob  of its window
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionVerbose(TypedDict):
    """The response format `verbose_json`."""

    task: Task
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage


class TranscriptTextDelta(TypedDict):
    """An event of a stream: further text."""

    type: Literal["transcript.text.delta"]
    delta: str
    logprobs: NotRequired[list[TranscriptLogprob]]


class TranscriptTextDone(TypedDict):
    """The last event of a stream: the whole text."""

    type: Literal["transcript.text.done"]
    text: str
    logprobs: NotRequired[list[TranscriptLogprob]]
    usage: TokenUsage
