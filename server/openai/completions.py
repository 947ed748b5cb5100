"""Text completions: the choices of all prompts as one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.types.events import Finished
from server.generation.choices import CompletedChoice, assembled, collect_choices
from server.generation.logprobs import completion_logprobs, concatenated, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_interval import with_interval
from server.generation.usage import timings, usage
from server.http.errors import check_deadline
from server.http.events import ChoiceEvents
from server.http.stream_encoder import StreamEncoder
from server.openai.completion_chunks import CompletionChunkEncoder, stop_text
from server.openai.prepared_completion import PreparedCompletion
from server.schemas.completions import Completion, CompletionRequest, TextChoice, TextLogprobs


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The answer to one completion request, as one object or as chunks.

    warnings  ignored or partly enforced parameters
    """

    prepared: PreparedCompletion
    warnings: tuple[str, ...] = ()

    @property
    def body(self) -> CompletionRequest:
        """The request body."""
        return self.prepared.body

    async def response(self, events: ChoiceEvents) -> Completion:
        """All events as one response."""
        choices = await collect_choices(events, len(self.prepared.requests))
        finished = [choice.finished for choice in choices]
        check_deadline(finished)
        return await assembled(sum(choice.scores for choice in choices), partial(self._answer, choices, finished))

    def _answer(self, choices: Sequence[CompletedChoice], finished: Sequence[Finished]) -> Completion:
        width = self.prepared.width
        answer = Completion(
            id=self.prepared.id,
            object="text_completion",
            created=self.prepared.created,
            model=self.prepared.model,
            system_fingerprint=self.prepared.fingerprint,
            service_tier=service_tier(self.body),
            choices=[self._choice(position, index, choices) for position, index in enumerate(self._best(choices))],
            usage=usage([finished[start : start + width] for start in range(0, len(finished), width)]),
        )
        self._add(answer, finished)
        return answer

    def encoder(self) -> StreamEncoder:
        """Encoder of the chunks of a stream."""
        return with_interval(CompletionChunkEncoder(self.prepared, self.warnings), self.body.stream_interval)

    def _best(self, choices: Sequence[CompletedChoice]) -> list[int]:
        """Indices of the returned choices of each prompt; with `best_of`, by mean log-probability."""
        best: list[int] = []
        for start in range(0, len(choices), self.prepared.width):
            group = list(range(start, start + self.prepared.width))
            if self.prepared.width > self.prepared.returned_choices:
                group.sort(key=lambda index: -choices[index].mean_logprob)
            best.extend(group[: self.prepared.returned_choices])
        return best

    def _choice(self, position: int, index: int, choices: Sequence[CompletedChoice]) -> TextChoice:
        choice, body = choices[index], self.body
        # The prompt is scored with the first of its choices.
        scored = choices[index - index % self.prepared.width].scored
        prompt = self.prepared.prompt(index)
        answer = TextChoice(
            index=position,
            text=(prompt.text if prompt else "") + choice.text + stop_text(body, choice.finished),
            logprobs=self._logprobs(index, choices),
            finish_reason=choice.finished.reason,
            stop_reason=choice.finished.stop,
        )
        if body.return_token_ids:
            answer["token_ids"] = [*choice.tokens, *choice.finished.tokens]
            answer["prompt_token_ids"] = list(self.prepared.requests[index].prompt)
        if scored is not None and body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(scored.entries, body.prompt_logprobs)
        return answer

    def _logprobs(self, index: int, choices: Sequence[CompletedChoice]) -> TextLogprobs | None:
        if self.body.logprobs is None:
            return None
        prompt, scored = self.prepared.prompt(index), choices[index - index % self.prepared.width].scored
        offset = len(prompt.text) if prompt else 0
        answer_logprobs = completion_logprobs(choices[index].logprobs, offset, self.prepared.logprob_format)
        if prompt is None or scored is None:
            return answer_logprobs
        return concatenated(prompt.logprobs(scored, self.prepared.logprob_format), answer_logprobs)

    def _add(self, answer: Completion, finished: Sequence[Finished]) -> None:
        # Choices run concurrently: the sum of their times has no meaning.
        if len(finished) == 1:
            answer["timings"] = timings(finished[0])
        if self.body.metadata is not None:
            answer["metadata"] = self.body.metadata
        if self.warnings:
            answer["warnings"] = list(self.warnings)
