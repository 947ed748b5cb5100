"""Validates a body of /v1/completions and prepares its engine requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio.to_thread

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.tagged import TaggedFormat
from engine.types.events import Logprob, PromptScored
from engine.types.request import RenderedPrompt, Request
from server.generation.grammar import answer_grammar
from server.generation.logprobs import LogprobFormat, completion_logprobs, concatenated, with_offsets
from server.generation.requests import check_capacity, choice_requests, engine_request, limit_warnings, truncated_prompt
from server.generation.tools import ToolSet
from server.http.errors import invalid_value, unsupported_parameter
from server.schemas.completions import CompletionRequest, TextLogprobs
from server.service import Service

# Completions have no chat format: everything is text.
PLAIN_TEXT_FORMAT = ChatFormat(TaggedFormat(), {})


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """A prompt for `echo`: its text and its first token, which has no log-probability."""

    text: str
    first_token: Logprob

    def logprobs(self, scored: PromptScored, logprob_format: LogprobFormat) -> TextLogprobs:
        """Log-probabilities of all tokens of the prompt."""
        name = logprob_format.name(self.first_token)
        opening = TextLogprobs(tokens=[name], token_logprobs=[None], top_logprobs=[None], text_offset=[0])
        entries = [entry for entry in scored.entries if entry is not None]
        return concatenated(
            opening, completion_logprobs(with_offsets(entries, self.first_token.bytes), 0, logprob_format)
        )


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A validated completion request.

    requests          `width` engine requests per prompt, in order
    prompts           empty without `echo`
    returned_choices  choices per prompt in the response, the best of `width`
    warnings          partly enforced parameters
    """

    id: str
    created: int
    model: str
    fingerprint: str
    body: CompletionRequest
    requests: tuple[Request, ...]
    prompts: tuple[CompletionPrompt, ...]
    width: int
    returned_choices: int
    warnings: tuple[str, ...] = ()

    @property
    def logprob_format(self) -> LogprobFormat:
        """Format of log-probabilities."""
        return LogprobFormat.of(self.body, self.body.logprobs or 0)

    def prompt(self, index: int) -> CompletionPrompt | None:
        """The echoed prompt of choice number `index`."""
        return self.prompts[index // self.width] if self.prompts else None


async def prepare_completion(service: Service, body: CompletionRequest, id: str) -> PreparedCompletion:
    """Validate a body and tokenize its prompts; raises ApiError or EngineError before anything runs."""
    service.check_ready()
    _check(service, body)
    returned = body.n or 1
    width = max(body.best_of or 1, returned)
    compiled = await answer_grammar(service, body, PLAIN_TEXT_FORMAT, ToolSet(), "")
    requests: list[Request] = []
    prompts: list[CompletionPrompt] = []
    for index, prompt in enumerate(body.prompt):
        tokenized = await _tokens(service, prompt, body.suffix)
        rendering = truncated_prompt(service, body, tokenized, body.max_tokens)
        if rendering is not tokenized:
            prompt = list(rendering.tokens)
        if body.echo:
            prompts.append(await anyio.to_thread.run_sync(_prompt, service, prompt, rendering.tokens))
        single = await _request(service, body, rendering, f"{id}-{index}", ranked=width > returned)
        requests.extend(_spread(replace(single, grammar=compiled.grammar), body, width))
    check_capacity(service, requests)
    return PreparedCompletion(
        id=id if body.request_id is None else f"cmpl-{body.request_id}",
        created=int(time.time()),
        model=service.name,
        fingerprint=service.fingerprint(),
        body=body,
        requests=tuple(requests),
        prompts=tuple(prompts),
        width=width,
        returned_choices=returned,
        warnings=(*limit_warnings(service, body, "max_tokens", body.max_tokens), *compiled.warnings),
    )


def _check(service: Service, body: CompletionRequest) -> None:
    if body.suffix and service.engine.tokenizer.fill_in_middle is None:
        raise unsupported_parameter("suffix", "its vocabulary has no fill-in-the-middle tokens")
    for other in ("echo", "truncate_prompt_tokens"):
        if body.suffix and getattr(body, other):
            raise invalid_value("suffix", f"it cannot be combined with '{other}'")
    if body.suffix and not all(isinstance(prompt, str) for prompt in body.prompt):
        raise invalid_value("suffix", "it needs a prompt of text")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid_value("max_tokens", "0 requires 'echo' or 'prompt_logprobs'")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid_value("best_of", "it is less than 'n'")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise invalid_value("best_of", "a value greater than 'n' cannot be streamed")
    if body.logprob_token_ids and body.logprobs is None:
        raise invalid_value("logprob_token_ids", "it needs 'logprobs'")


async def _request(
    service: Service, body: CompletionRequest, prompt: RenderedPrompt, id: str, *, ranked: bool
) -> Request:
    # `best_of` ranks choices by log-probability, returned or not.
    logprobs = 0 if ranked and body.logprobs is None else body.logprobs
    single = await engine_request(service, body, prompt, id=id, max_tokens=body.max_tokens, logprobs=logprobs)
    gap = service.engine.tokenizer.fill_in_middle if body.suffix else None
    if gap is not None:
        single = replace(single, stop_token_ids=(*single.stop_token_ids, *gap.ends))
    scored = body.echo and body.logprobs is not None
    return replace(single, score_from=0) if scored else single


def _spread(request: Request, body: CompletionRequest, width: int) -> tuple[Request, ...]:
    choices = choice_requests(request, width)
    # In a stream, each choice begins with its echoed prompt, without waiting for another choice.
    echoed = body.stream and body.echo
    return tuple(replace(choice, score_from=request.score_from) for choice in choices) if echoed else choices


async def _tokens(service: Service, prompt: str | list[int], suffix: str | None) -> RenderedPrompt:
    if isinstance(prompt, list):
        return RenderedPrompt(tuple(prompt))
    if suffix:
        gap = await anyio.to_thread.run_sync(service.engine.tokenizer.encode_gap, prompt, suffix)
        return RenderedPrompt(tuple(gap))
    encode = service.engine.tokenizer.encode
    tokens = await anyio.to_thread.run_sync(encode, prompt, limiter=service.threads.encoding)
    if not tokens:
        raise invalid_value("prompt", "it has no tokens")
    return RenderedPrompt(tuple(tokens))


def _prompt(service: Service, prompt: str | list[int], tokens: Sequence[int]) -> CompletionPrompt:
    tokenizer = service.engine.tokenizer
    text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
    return CompletionPrompt(text, tokenizer.describe_tokens(tokens[:1])[0])
