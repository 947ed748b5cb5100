"""Responses to a transcription: text, subtitles, JSON, and a stream of events."""

from __future__ import annotations

import math
from contextlib import AbstractAsyncContextManager

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from engine.types.events import TokenLogprob
from engine.types.speech import SpeechFeatures, SpeechInfo
from server.audio.formats import SUBTITLES, TextDeltas, logprobs_of, plain_text, verbose_segment
from server.audio.segments import SpeechSegment
from server.audio.transcriber import Transcriber
from server.configuration.settings import ClientLimits
from server.http.encoding import JsonResponse
from server.http.sse import DONE, frame, send_event_stream
from server.http.stream_encoder import Frames, with_error_frame
from server.schemas.audio import (
    DurationUsage,
    Task,
    TokenUsage,
    Transcription,
    TranscriptionFields,
    TranscriptionVerbose,
    TranscriptTextDelta,
    TranscriptTextDone,
)

# Of a model with one language.
_ENGLISH = "english"


async def whole_answer(
    transcriber: Transcriber, form: TranscriptionFields, task: Task, speech: SpeechInfo, features: SpeechFeatures
) -> Response:
    """The response without a stream."""
    segments = [segment async for segment in transcriber.segments()]
    if form.response_format == "verbose_json":
        return JsonResponse(_verbose(segments, form, task, _language_name(transcriber, speech), features))
    if form.response_format != "json":
        return PlainTextResponse(SUBTITLES[form.response_format](segments))
    answer = Transcription(text=plain_text(segments), usage=_token_usage(transcriber, speech, features))
    if form.include:
        answer["logprobs"] = logprobs_of(speech, _logprobs(segments))
    return JsonResponse(answer)


class TranscriptStream(Response):
    """A stream of events, one for each segment. The sound is decoded before the status is sent."""

    def __init__(
        self,
        opening: AbstractAsyncContextManager[tuple[Transcriber, SpeechFeatures]],
        form: TranscriptionFields,
        speech: SpeechInfo,
        limits: ClientLimits,
    ) -> None:
        super().__init__()
        self._opening, self._form, self._speech, self._limits = opening, form, speech, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a disconnect of the client cancels the work."""
        async with self._opening as (transcriber, features):
            frames = with_error_frame(self._frames(transcriber, features), scope, frame)
            await send_event_stream(frames, self._limits, scope, receive, send)

    async def _frames(self, transcriber: Transcriber, features: SpeechFeatures) -> Frames:
        deltas, segments = TextDeltas(), list[SpeechSegment]()
        async for segment in transcriber.segments():
            segments.append(segment)
            delta = TranscriptTextDelta(type="transcript.text.delta", delta=deltas.append(segment.text))
            if self._form.include:
                delta["logprobs"] = logprobs_of(self._speech, segment.logprobs)
            if delta["delta"]:
                yield frame(delta)
        usage = _token_usage(transcriber, self._speech, features)
        done = TranscriptTextDone(type="transcript.text.done", text=plain_text(segments), usage=usage)
        if self._form.include:
            done["logprobs"] = logprobs_of(self._speech, _logprobs(segments))
        yield frame(done)
        yield DONE


def _verbose(
    segments: list[SpeechSegment], form: TranscriptionFields, task: Task, language: str, features: SpeechFeatures
) -> TranscriptionVerbose:
    return TranscriptionVerbose(
        task=task,
        language=language,
        duration=round(features.seconds, 3),
        text=plain_text(segments),
        segments=[verbose_segment(number, segment, form.temperature) for number, segment in enumerate(segments)],
        usage=DurationUsage(type="duration", seconds=math.ceil(features.seconds)),
    )


def _token_usage(transcriber: Transcriber, speech: SpeechInfo, features: SpeechFeatures) -> TokenUsage:
    counts = transcriber.counts
    audio_tokens = -(-features.content_frames // speech.frames_per_timestamp)
    return TokenUsage(
        type="tokens",
        input_tokens=audio_tokens + counts.prompt,
        output_tokens=counts.completion,
        total_tokens=audio_tokens + counts.prompt + counts.completion,
        input_token_details={"audio_tokens": audio_tokens, "text_tokens": counts.prompt},
    )


def _language_name(transcriber: Transcriber, speech: SpeechInfo) -> str:
    names = {language.code: language.name for language in speech.languages}
    return names.get(transcriber.language or "", _ENGLISH)


def _logprobs(segments: list[SpeechSegment]) -> list[TokenLogprob]:
    return [entry for segment in segments for entry in segment.logprobs]
