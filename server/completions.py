"""Text completions: prompts to requests, events to one answer or to the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.types import Delta, Finished, Rendering, Request, TokenLogprob
from server.errors import INVALID_VALUE, ApiError
from server.fold import Choice, fold
from server.generation import Events, prediction, request
from server.logprobs import length, text_logprobs
from server.schemas.completions import Completion, CompletionRequest, TextChoice, TextLogprobs
from server.service import Service
from server.usage import timings, usage


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The answer to one request, in one piece or as chunks; every prompt of it is a choice."""

    id: str
    created: int
    model: str
    fingerprint: str
    body: CompletionRequest

    async def whole(self, events: Events) -> Completion:
        """All events as one answer."""
        choices = await fold(events, len(self.body.prompt))
        finished = [choice.finished for choice in choices]
        answer = self._frame([self._choice(index, choice) for index, choice in enumerate(choices)])
        answer["usage"] = usage(finished)
        self._add_timings(answer, finished)
        if self.body.metadata is not None:
            answer["metadata"] = self.body.metadata
        return answer

    async def chunks(self, events: Events) -> AsyncGenerator[Completion, None]:
        """The events as chunks, those of several prompts as they come; the usage last, if it was asked for."""
        offsets = [0] * len(self.body.prompt)
        finished: list[Finished] = []
        async for index, event in events:
            if isinstance(event, Delta) and (event.text or event.logprobs):
                logprobs = self._logprobs(event.logprobs, offsets[index])
                offsets[index] += length(event.logprobs)
                yield self._chunk(TextChoice(index=index, text=event.text, logprobs=logprobs, finish_reason=None))
            if isinstance(event, Finished):
                finished.append(event)
                yield self._last(index, event)
        if self.body.include_usage:
            yield self._cost(finished)

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        return TextChoice(
            index=index,
            text=choice.text,
            logprobs=self._logprobs(choice.logprobs, 0),
            finish_reason=choice.finished.reason,
            stop_reason=choice.finished.stop,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> TextLogprobs | None:
        return None if self.body.logprobs is None else text_logprobs(tokens, offset)

    def _last(self, index: int, event: Finished) -> Completion:
        choice = TextChoice(index=index, text="", logprobs=None, finish_reason=event.reason, stop_reason=event.stop)
        chunk = self._chunk(choice)
        if not self.body.include_usage:
            self._add_timings(chunk, [event])
        return chunk

    def _cost(self, finished: Sequence[Finished]) -> Completion:
        chunk = self._frame([])
        chunk["usage"] = usage(finished)
        self._add_timings(chunk, finished)
        return chunk

    def _add_timings(self, answer: Completion, finished: Sequence[Finished]) -> None:
        # Those of several prompts overlap and add up to nothing that was ever measured.
        if len(self.body.prompt) == 1:
            answer["timings"] = timings(finished[0])

    def _chunk(self, choice: TextChoice) -> Completion:
        chunk = self._frame([choice])
        if self.body.include_usage:
            chunk["usage"] = None
        return chunk

    def _frame(self, choices: list[TextChoice]) -> Completion:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
        )


async def completion_requests(service: Service, body: CompletionRequest, id: str) -> list[Request]:
    """One request a prompt; raises what the client did wrong."""
    prompts = [await _tokens(service, prompt) for prompt in body.prompt]
    most, logprobs, expected = body.max_tokens, body.logprobs, await prediction(service, body)
    return [
        request(service, body, prompt, id=f"{id}-{at}", max_tokens=most, logprobs=logprobs, prediction=expected)
        for at, prompt in enumerate(prompts)
    ]


async def _tokens(service: Service, prompt: str | list[int]) -> Rendering:
    if isinstance(prompt, list):
        return Rendering(tuple(prompt))
    tokens = await anyio.to_thread.run_sync(service.engine.tokenizer.encode, prompt)
    if not tokens:
        raise ApiError(INVALID_VALUE, "Invalid value for 'prompt': it has no tokens.", param="prompt")
    return Rendering(tuple(tokens))
