"""Chunks of a streamed completion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.types.events import Delta, Event, Finished, PrefillProgress, PromptScored, Started
from server.generation.continuation import is_resumable
from server.generation.logprobs import completion_logprobs, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_usage import StreamUsage
from server.http.encoding import PLACEHOLDER, JsonTemplate
from server.http.sse import frame
from server.openai.prepared_completion import PreparedCompletion
from server.schemas.completions import Completion, CompletionRequest, TextChoice, TextLogprobs


def stop_text(body: CompletionRequest, finished: Finished) -> str:
    """The stop string that ended a choice, if the text shall include it."""
    # A match of a stop expression is part of the text already.
    included = body.include_stop_str_in_output and finished.reason == "stop" and finished.stop in (body.stop or ())
    return finished.stop if included and isinstance(finished.stop, str) else ""


class CompletionChunkEncoder:
    """Encodes the events of one stream, with one or more choices, as chunks."""

    def __init__(self, prepared: PreparedCompletion, warnings: tuple[str, ...]) -> None:
        self._prepared, self._body, self._warnings = prepared, prepared.body, warnings
        self._usage = StreamUsage(prepared.body, prepared.requests, prepared.width)
        # Text offset of the next delta of each choice; None: the prompt has not been echoed yet.
        self._offsets: list[int | None] = [None if prepared.prompts else 0 for _ in prepared.requests]
        self._started: set[int] = set()
        self._has_first = False
        # Fast path: chunks with text only are encoded from a template per choice.
        body = prepared.body
        self._is_plain = body.logprobs is None and not (body.return_token_ids or self._usage.reports_continuously)
        self._templates: dict[int, JsonTemplate] = {}
        # Text without tokens at the end of a choice: it is in the last chunk, so that a client has all of it or none.
        self._is_resumable = is_resumable(body)
        self._held: dict[int, str] = {}
        self._seed = 0

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode the chunks of an event."""
        template = self._templates.get(choice)
        if template is not None and isinstance(event, Delta) and event.text:
            return template.fill(event.text)
        body = b"".join([self._encoded(chunk) for chunk in self._chunks(choice, event)])
        if template is None and self._is_plain and choice in self._started:
            self._templates[choice] = JsonTemplate(frame(self._chunk(choice, PLACEHOLDER)))
        return body

    async def close(self) -> bytes:
        """Usage, if requested."""
        return frame(self._usage_chunk()) if self._body.include_usage else b""

    def _encoded(self, chunk: Completion) -> bytes:
        # Warnings are in the first chunk.
        if self._warnings:
            chunk["warnings"], self._warnings = list(self._warnings), ()
        if self._is_resumable and not self._has_first and len(self._prepared.requests) == 1:
            chunk["seed"], self._has_first = self._seed, True
        return frame(chunk)

    def _chunks(self, index: int, event: Event) -> Iterator[Completion]:
        match event:
            case Started():
                self._start(index, event)
            case PrefillProgress():
                yield self._progress(index, event)
            case PromptScored():
                yield from self._scored(index, event)
            case Delta():
                yield from self._echo(index)
                self._usage.add_tokens(index, len(event.tokens))
                if self._is_resumable and not event.tokens:
                    self._held[index] = self._held.get(index, "") + event.text
                else:
                    yield from self._text(index, event)
            case Finished():
                yield from self._echo(index)
                ending = self._held.pop(index, "") + stop_text(self._body, event)
                if ending and not self._is_resumable:
                    yield self._chunk(index, ending)
                    ending = ""
                yield self._end(index, event, ending)

    def _start(self, index: int, event: Started) -> None:
        self._usage.start(index, event)
        self._seed = event.seed
        for delta in event.earlier:
            self._usage.add_tokens(index, len(delta.tokens))
            self._offsets[index] = (self._offsets[index] or 0) + len(delta.text)

    def _echo(self, index: int, logprobs: TextLogprobs | None = None) -> Iterator[Completion]:
        """The echoed prompt, before the first delta of a choice."""
        prompt = self._prepared.prompt(index)
        if prompt is not None and self._offsets[index] is None:
            self._offsets[index] = len(prompt.text)
            yield self._chunk(index, prompt.text, logprobs)

    def _scored(self, index: int, event: PromptScored) -> Iterator[Completion]:
        prompt = self._prepared.prompt(index)
        if prompt is not None:
            with_logprobs = self._body.logprobs is not None
            logprobs = prompt.logprobs(event, self._prepared.logprob_format) if with_logprobs else None
            yield from self._echo(index, logprobs)
        if self._body.prompt_logprobs is not None:
            chunk = self._chunk(index, "")
            chunk["choices"][0]["prompt_logprobs"] = prompt_logprobs(event.entries, self._body.prompt_logprobs)
            yield chunk

    def _answer_offset(self, index: int) -> int:
        """Text offset of the answer in a choice."""
        prompt = self._prepared.prompt(index)
        return len(prompt.text) if prompt else 0

    def _text(self, index: int, event: Delta) -> Iterator[Completion]:
        tokens = list(event.tokens) if self._body.return_token_ids else []
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(event.logprobs, self._answer_offset(index), self._prepared.logprob_format)
            self._offsets[index] = (self._offsets[index] or 0) + len(event.text)
        if event.text or event.logprobs or tokens:
            chunk = self._chunk(index, event.text, logprobs)
            if tokens:
                chunk["choices"][0]["token_ids"] = tokens
            yield chunk

    def _end(self, index: int, event: Finished, ending: str) -> Completion:
        self._usage.end(index, event)
        logprobs = None
        if event.end_logprob is not None and self._body.logprobs is not None:
            end_logprob = replace(event.end_logprob, text_offset=0)
            offset = self._offsets[index] or 0
            logprobs = completion_logprobs([end_logprob], offset, self._prepared.logprob_format)
        chunk = self._chunk(index, ending, logprobs)
        chunk["choices"][0]["finish_reason"] = event.reason
        chunk["choices"][0]["stop_reason"] = event.stop
        if self._body.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(event.tokens)
        self._usage.add_final_timings(chunk)
        return chunk

    def _usage_chunk(self) -> Completion:
        chunk = self._new_chunk([])
        self._usage.add_total(chunk)
        return chunk

    def _progress(self, index: int, event: PrefillProgress) -> Completion:
        chunk = self._new_chunk([])
        self._usage.add_progress(chunk, index, event)
        return chunk

    def _chunk(self, index: int, text: str, logprobs: TextLogprobs | None = None) -> Completion:
        choice = TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)
        if self._body.return_token_ids and index not in self._started:
            choice["prompt_token_ids"] = list(self._prepared.requests[index].prompt)
        self._started.add(index)
        chunk = self._new_chunk([choice])
        self._usage.add_usage(chunk, index)
        return chunk

    def _new_chunk(self, choices: list[TextChoice]) -> Completion:
        chunk = Completion(
            id=self._prepared.id,
            object="text_completion",
            created=self._prepared.created,
            model=self._prepared.model,
            system_fingerprint=self._prepared.fingerprint,
            service_tier=service_tier(self._body),
            choices=choices,
        )
        self._usage.add_placeholder(chunk)
        return chunk
