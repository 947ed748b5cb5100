"""The stream of a completion: what its choices say, as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.types.events import Delta, Event, Finished, PrefillProgress, PromptScored, Started
from server.generation.logprobs import completion_logprobs, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_usage import StreamUsage
from server.http.encoding import PLACEHOLDER, JsonTemplate
from server.http.sse import frame
from server.openai.completion_work import CompletionWork
from server.schemas.completions import Completion, CompletionRequest, TextChoice, TextLogprobs


def stop_text(body: CompletionRequest, finished: Finished) -> str:
    """The stop string that ended a text, where the text is to hold it."""
    # What a regular expression matched is part of the text already.
    wanted = body.include_stop_str_in_output and finished.reason == "stop" and finished.stop in (body.stop or ())
    return finished.stop if wanted and isinstance(finished.stop, str) else ""


class CompletionChunkEncoder:
    """The chunks of one stream, of one or several choices as they come."""

    def __init__(self, work: CompletionWork, warnings: tuple[str, ...]) -> None:
        self._work, self._body, self._warnings = work, work.body, warnings
        self._usage = StreamUsage(work.body, work.requests, work.width)
        # Where the next text of each choice stands; None: its prompt has not been repeated yet.
        self._offsets: list[int | None] = [None if work.prompts else 0 for _ in work.requests]
        self._begun: set[int] = set()
        # Whether chunks of text tell nothing beside it, as nearly all do, and what they are written from.
        body = work.body
        self._is_plain = body.logprobs is None and not (body.return_token_ids or self._usage.reports_continuously)
        self._templates: dict[int, JsonTemplate] = {}

    def encode(self, choice: int, event: Event) -> bytes:
        """What is said, and the end of each choice."""
        template = self._templates.get(choice)
        if template is not None and isinstance(event, Delta) and event.text:
            return template.fill(event.text)
        body = b"".join([self._encoded(chunk) for chunk in self._chunks(choice, event)])
        if template is None and self._is_plain and choice in self._begun:
            self._templates[choice] = JsonTemplate(frame(self._chunk(choice, PLACEHOLDER)))
        return body

    async def close(self) -> bytes:
        """The cost of all, if it was asked for."""
        return frame(self._usage_chunk()) if self._body.include_usage else b""

    def _encoded(self, chunk: Completion) -> bytes:
        # The first one tells what was asked for in vain.
        if self._warnings:
            chunk["warnings"], self._warnings = list(self._warnings), ()
        return frame(chunk)

    def _chunks(self, index: int, event: Event) -> Iterator[Completion]:
        match event:
            case Started():
                self._usage.start(index, event)
            case PrefillProgress():
                yield self._progress(index, event)
            case PromptScored():
                yield from self._scored(index, event)
            case Delta():
                yield from self._repeat(index)
                self._usage.add_tokens(index, len(event.tokens))
                yield from self._text(index, event)
            case Finished():
                yield from self._repeat(index)
                if ending := stop_text(self._body, event):
                    yield self._chunk(index, ending)
                yield self._end(index, event)

    def _repeat(self, index: int, logprobs: TextLogprobs | None = None) -> Iterator[Completion]:
        """The prompt, before anything else of a choice."""
        prompt = self._work.prompt(index)
        if prompt is not None and self._offsets[index] is None:
            self._offsets[index] = len(prompt.text)
            yield self._chunk(index, prompt.text, logprobs)

    def _scored(self, index: int, event: PromptScored) -> Iterator[Completion]:
        prompt = self._work.prompt(index)
        if prompt is not None:
            asked = self._body.logprobs is not None
            yield from self._repeat(index, prompt.logprobs(event, self._work.logprob_format) if asked else None)
        if self._body.prompt_logprobs is not None:
            chunk = self._chunk(index, "")
            chunk["choices"][0]["prompt_logprobs"] = prompt_logprobs(event.entries, self._body.prompt_logprobs)
            yield chunk

    def _start(self, index: int) -> int:
        """Where the answer begins in the text of a choice."""
        prompt = self._work.prompt(index)
        return len(prompt.text) if prompt else 0

    def _text(self, index: int, event: Delta) -> Iterator[Completion]:
        tokens = list(event.tokens) if self._body.return_token_ids else []
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(event.logprobs, self._start(index), self._work.logprob_format)
            self._offsets[index] = (self._offsets[index] or 0) + len(event.text)
        if event.text or event.logprobs or tokens:
            chunk = self._chunk(index, event.text, logprobs)
            if tokens:
                chunk["choices"][0]["token_ids"] = tokens
            yield chunk

    def _end(self, index: int, event: Finished) -> Completion:
        self._usage.end(index, event)
        ending = None if event.end_logprob is None or self._body.logprobs is None else event.end_logprob
        offset = self._offsets[index] or 0
        logprobs = (
            None
            if ending is None
            else completion_logprobs([replace(ending, text_offset=0)], offset, self._work.logprob_format)
        )
        chunk = self._chunk(index, "", logprobs)
        chunk["choices"][0]["finish_reason"] = event.reason
        chunk["choices"][0]["stop_reason"] = event.stop
        if self._body.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(event.tokens)
        self._usage.add_final(chunk)
        return chunk

    def _usage_chunk(self) -> Completion:
        chunk = self._frame([])
        self._usage.total(chunk)
        return chunk

    def _progress(self, index: int, event: PrefillProgress) -> Completion:
        chunk = self._frame([])
        self._usage.add_progress(chunk, index, event)
        return chunk

    def _chunk(self, index: int, text: str, logprobs: TextLogprobs | None = None) -> Completion:
        choice = TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)
        if self._body.return_token_ids and index not in self._begun:
            choice["prompt_token_ids"] = list(self._work.requests[index].prompt)
        self._begun.add(index)
        chunk = self._frame([choice])
        self._usage.add_usage(chunk, index)
        return chunk

    def _frame(self, choices: list[TextChoice]) -> Completion:
        chunk = Completion(
            id=self._work.id,
            object="text_completion",
            created=self._work.created,
            model=self._work.model,
            system_fingerprint=self._work.fingerprint,
            service_tier=service_tier(self._body),
            choices=choices,
        )
        self._usage.add_placeholder(chunk)
        return chunk
