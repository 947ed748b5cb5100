"""Answers of llama.cpp's API: one object, a list of them for several prompts, or chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.types.events import Delta, Event, Finished, Started, TokenLogprob
from engine.types.events import Logprob as TokenEntry
from server.generation.choices import collect_choices
from server.generation.logprobs import finite_logprob
from server.generation.usage import timings
from server.http.events import ChoiceEvents
from server.http.sse import frame
from server.llama.translation import PreparedLlama
from server.schemas.llama import LlamaCompletion, TokenProbability


class LlamaEncoder:
    """Encodes the events of one stream."""

    def __init__(self, prepared: PreparedLlama, warnings: tuple[str, ...]) -> None:
        self._prepared, self._warnings = prepared, warnings
        self._texts = [_Progress() for _ in prepared.requests]

    def encode(self, choice: int, event: Event) -> bytes:
        """The chunk of an event, if it has one."""
        progress = self._texts[choice]
        match event:
            case Started():
                progress.prompt_tokens = event.prompt_tokens
            case Delta() if event.text or event.tokens:
                progress.add(event)
                return frame(
                    _chunk(choice, event.text, event.tokens, progress, self._prepared.body.n_probs, event.logprobs)
                )
            case Finished():
                progress.end(event)
                return frame(completed(self._prepared, choice, "", (), progress, event, self._warnings))
        return b""

    async def close(self) -> bytes:
        """Nothing follows the last chunk."""
        return b""


class _Progress:
    """What a choice has so far."""

    def __init__(self) -> None:
        self.prompt_tokens = self.tokens = 0
        self.has_new_line = False

    def add(self, delta: Delta) -> None:
        self.tokens += len(delta.tokens)
        self.has_new_line = self.has_new_line or "\n" in delta.text

    def end(self, finished: Finished) -> None:
        self.prompt_tokens, self.tokens = finished.usage.prompt_tokens, finished.usage.completion_tokens


async def response(
    prepared: PreparedLlama, events: ChoiceEvents, warnings: tuple[str, ...]
) -> dict[str, Any] | list[dict[str, Any]]:
    """All events as one answer for each prompt."""
    choices = await collect_choices(events, len(prepared.requests))
    answers = []
    for index, choice in enumerate(choices):
        progress = _Progress()
        progress.has_new_line = "\n" in choice.text
        progress.end(choice.finished)
        answer = completed(
            prepared, index, choice.text, choice.tokens, progress, choice.finished, warnings, choice.logprobs
        )
        answers.append(_selected(answer, prepared.body.response_fields))
    return answers[0] if len(answers) == 1 else answers


def completed(
    prepared: PreparedLlama,
    index: int,
    text: str,
    tokens: Sequence[int],
    progress: _Progress,
    finished: Finished,
    warnings: tuple[str, ...],
    logprobs: Sequence[TokenLogprob] = (),
) -> LlamaCompletion:
    """The answer to a prompt, or the last chunk of its stream."""
    stopped_by = finished.stop if isinstance(finished.stop, str) and finished.reason == "stop" else ""
    answer = _chunk(
        index, text, tokens if prepared.body.return_tokens else (), progress, prepared.body.n_probs, logprobs
    )
    answer["stop"] = True
    answer["model"] = prepared.model
    answer["generation_settings"] = prepared.settings
    answer["prompt"] = prepared.prompts[index]
    answer["has_new_line"] = progress.has_new_line
    answer["truncated"] = finished.usage.context_shifts > 0
    answer["stop_type"] = "limit" if finished.reason == "length" else "word" if stopped_by else "eos"
    answer["stopping_word"] = stopped_by
    answer["tokens_cached"] = finished.usage.prompt_tokens + finished.usage.completion_tokens
    answer["timings"] = timings(finished)
    if warnings:
        answer["warnings"] = list(warnings)
    return answer


def _chunk(
    index: int,
    text: str,
    tokens: Sequence[int],
    progress: _Progress,
    top: int | None,
    logprobs: Sequence[TokenLogprob],
) -> LlamaCompletion:
    chunk = LlamaCompletion(
        index=index,
        content=text,
        tokens=list(tokens),
        # Sequences move between slots.
        id_slot=-1,
        stop=False,
        tokens_predicted=progress.tokens,
        tokens_evaluated=progress.prompt_tokens,
    )
    if top and logprobs:
        chunk["completion_probabilities"] = [
            {**_entry(token.chosen), "top_logprobs": [_entry(other) for other in token.top[:top]]} for token in logprobs
        ]
    return chunk


def _entry(token: TokenEntry) -> TokenProbability:
    return TokenProbability(
        id=token.token, token=token.text, bytes=list(token.bytes), logprob=finite_logprob(token.logprob)
    )


def _selected(answer: Mapping[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """The requested fields under their full names, such as timings/prompt_ms; unknown ones are left out."""
    if fields is None:
        return dict(answer)
    selected = {}
    for field in fields:
        value: Any = answer
        for key in field.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            selected[field] = value
    return selected
