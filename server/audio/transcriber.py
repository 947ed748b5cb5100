"""Transcribes a sound by one engine request for each window; a window starts where the segments before it end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import anyio.to_thread

from engine.errors import Overloaded
from engine.types.events import Delta, Event, Finished, PromptScored, TokenLogprob
from engine.types.request import Media, Request, SamplingParams
from engine.types.speech import SpeechFeatures, SpeechInfo
from server.audio.segments import SpeechSegment, WindowSegment, WindowSplitter, text_tokens
from server.http.errors import check_deadline
from server.http.events import ChoiceEvents
from server.service import Service

# Between two attempts to queue a window after the first one.
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TranscriptionJob:
    """A validated request.

    prompt       tokens of text before the sound, without `previous_token`
    language     code of the sound's language; None: it is detected
    has_logprobs  whether segments have log-probabilities and `no_speech`
    """

    id: str
    task: str
    prompt: tuple[int, ...]
    language: str | None
    temperature: float
    has_logprobs: bool


@dataclass(slots=True)
class TokenCounts:
    """Tokens of prompts and of outputs so far."""

    prompt: int = 0
    completion: int = 0

    def add(self, finished: Finished) -> None:
        self.prompt += finished.usage.prompt_tokens
        self.completion += finished.usage.completion_tokens


@dataclass(slots=True)
class _Window:
    """The output of a window so far; `seek` is its first frame."""

    seek: int
    splitter: WindowSplitter
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scored: PromptScored | None = None

    def no_speech(self) -> float:
        """The probability of `no_speech_token` after the start token; 0 without log-probabilities."""
        entries = self.logprobs if self.scored is None else self.scored.entries
        labels = next((entry.labels for entry in entries if entry is not None), ())
        return math.exp(labels[0].logprob) if labels else 0.0


class Transcriber:
    """Transcribes one sound.

    counts  tokens so far, also of the detection of the language
    """

    def __init__(
        self, service: Service, speech: SpeechInfo, transcription: TranscriptionJob, features: SpeechFeatures
    ) -> None:
        self._service, self._speech = service, speech
        self._transcription, self._features = transcription, features
        self._language = transcription.language
        self.counts = TokenCounts()

    @property
    def language(self) -> str | None:
        """The code of the language, once it is known."""
        return self._language

    async def detect_language(self) -> None:
        """Find the most probable language of the first window, unless it is known."""
        if self._language is not None or not self._speech.languages:
            return
        codes = {language.token: language.code for language in self._speech.languages}
        params = SamplingParams(temperature=0.0, allowed_tokens=tuple(codes))
        prompt = (self._speech.start_token,)
        request = Request(
            f"{self._transcription.id}-language", prompt, params, max_tokens=1, media=await self._media(0)
        )
        tokens: list[int] = []
        async with self._service.open(request, "transcriptions") as events:
            async for _, event in events:
                tokens.extend(_new_tokens(event))
                if isinstance(event, Finished):
                    self.counts.add(event)
        self._language = codes[tokens[0]]

    async def segments(self) -> AsyncGenerator[SpeechSegment, None]:
        """The segments with text, in order. Raises EngineError and ApiError."""
        seek, number = 0, 0
        while seek < self._features.content_frames:
            frames = min(self._features.content_frames - seek, self._speech.window_frames)
            window = _Window(seek, WindowSplitter(self._speech, seek, frames))
            async with aclosing(self._window_segments(window, number)) as segments:
                async for segment in segments:
                    yield segment
            last, step = window.splitter.finish()
            if last is not None and (segment := await self._segment(window, last)).text:
                yield segment
            seek, number = seek + step, number + 1

    async def _window_segments(self, window: _Window, number: int) -> AsyncGenerator[SpeechSegment, None]:
        request = self._request(number, await self._media(window.seek))
        async with self._open(request, is_first=number == 0) as events:
            async for _, event in events:
                if isinstance(event, PromptScored):
                    window.scored = event
                for token, logprob in self._output(event):
                    window.tokens.append(token)
                    window.logprobs.extend(logprob)
                    ended = window.splitter.append(token)
                    if ended is not None and (segment := await self._segment(window, ended)).text:
                        yield segment
                if isinstance(event, Finished):
                    check_deadline([event])
                    self.counts.add(event)

    def _output(self, event: Event) -> list[tuple[int, Sequence[TokenLogprob]]]:
        """The tokens of an event with their log-probabilities, without the end token."""
        logprobs: dict[int, TokenLogprob] = {}
        if isinstance(event, Delta):
            logprobs = dict(enumerate(event.logprobs))
        tokens = enumerate(_new_tokens(event))
        end = self._speech.rule.end_token
        return [(token, [logprobs[index]] if index in logprobs else []) for index, token in tokens if token != end]

    def _request(self, number: int, media: Media) -> Request:
        speech, transcription = self._speech, self._transcription
        prompt = self._prompt()
        start = prompt.index(speech.start_token)
        has_logprobs, follows_start = transcription.has_logprobs, start == len(prompt) - 1
        return Request(
            f"{transcription.id}-{number}",
            prompt,
            SamplingParams(temperature=transcription.temperature),
            max_tokens=max(min(speech.max_tokens, self._service.engine.info.context) - len(prompt), 1),
            logprobs=0 if has_logprobs else None,
            score_from=start + 1 if has_logprobs and not follows_start else None,
            label_tokens=(speech.no_speech_token,) if has_logprobs else (),
            overflow="length",
            media=media,
            timestamps=speech.rule,
        )

    def _prompt(self) -> tuple[int, ...]:
        """Text before the sound, the start token, and the language and the task if the model has several."""
        speech, before = self._speech, self._transcription.prompt
        opening = (speech.previous_token, *before) if before and speech.previous_token is not None else ()
        languages = {language.code: language.token for language in speech.languages}
        if self._language is None or not languages:
            return (*opening, speech.start_token)
        tasks = dict(speech.tasks)
        task = (tasks[self._transcription.task],) if tasks else ()
        return (*opening, speech.start_token, languages[self._language], *task)

    async def _segment(self, window: _Window, part: WindowSegment) -> SpeechSegment:
        tokens, logprobs = window.tokens[part.first : part.stop], window.logprobs[part.first : part.stop]
        text = await anyio.to_thread.run_sync(self._service.engine.tokenizer.decode, text_tokens(self._speech, tokens))
        no_speech = window.no_speech()
        return SpeechSegment(window.seek, part.start, part.end, tuple(tokens), text, tuple(logprobs), no_speech)

    async def _media(self, seek: int) -> Media:
        return await anyio.to_thread.run_sync(self._features.window, seek, self._speech.window_frames)

    @asynccontextmanager
    async def _open(self, request: Request, *, is_first: bool) -> AsyncIterator[ChoiceEvents]:
        """The events of a window. A full queue refuses the first window only: the work of earlier ones is kept."""
        async with AsyncExitStack() as stack:
            while True:
                try:
                    events = await stack.enter_async_context(self._service.open(request, "transcriptions"))
                    break
                except Overloaded:
                    if is_first:
                        raise
                    await asyncio.sleep(_RETRY_SECONDS)
            yield events


def _new_tokens(event: Event) -> tuple[int, ...]:
    return event.tokens if isinstance(event, Delta | Finished) else ()
