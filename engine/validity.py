"""Whether the numbers in a request make sense, asked before anything is computed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from engine.errors import InvalidRequest
from engine.types.request import Dry, Request, SamplingParams, Thinking, Xtc


def check_prompt(prompt: Sequence[int], vocabulary: int, image: int | None) -> None:
    """Every token has a row of the embedding, or is the placeholder of an image. Raises InvalidRequest."""
    # Loops in C: a prompt may have hundreds of thousands of tokens.
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        _tokens("prompt", (token for token in prompt if token != image), vocabulary)


def check_rules(request: Request, vocabulary: int) -> None:
    """Everything that says which tokens may follow. Raises InvalidRequest, which names the field."""
    params = request.sampling
    _tokens("logit_bias", (token for token, _ in params.logit_bias), vocabulary)
    _tokens("stop_token_ids", request.stop_token_ids, vocabulary)
    if params.allowed_tokens is not None:
        _tokens("allowed_tokens", params.allowed_tokens, vocabulary)
        _need("allowed_tokens", bool(params.allowed_tokens), "without any token nothing can be said")
    for word in params.bad_words:
        _tokens("bad_words", word, vocabulary)
        _need("bad_words", bool(word), "a bad word has at least one token")
    _need("min_tokens", request.min_tokens >= 0, "it is not negative")
    most = request.max_tokens
    _need("min_tokens", most is None or request.min_tokens <= most, f"it is {most} at most, which is max_tokens")
    if request.thinking is not None:
        _check_thinking(request.thinking, vocabulary)
    _check_filters(params)


def _check_filters(params: SamplingParams) -> None:
    _need("typical_p", 0 < params.typical_p <= 1, "it lies in (0, 1]")
    _need("top_n_sigma", 0 <= params.top_n_sigma < inf, "it is a number from 0 on")
    if params.dry is not None:
        _check_dry(params.dry)
    if params.xtc is not None:
        _check_xtc(params.xtc)


def _check_dry(dry: Dry) -> None:
    _need("dry", 0 <= dry.multiplier < inf, "the multiplier is a number from 0 on")
    _need("dry", 1 <= dry.base < inf, "the base is a number from 1 on")
    _need("dry", dry.allowed_length >= 1, "the allowed length is 1 at least")
    _need("dry", dry.last >= -1, "it looks at 0 tokens and more, or with -1 at all")


def _check_xtc(xtc: Xtc) -> None:
    _need("xtc", 0 <= xtc.probability <= 1, "the probability lies in [0, 1]")
    _need("xtc", 0 <= xtc.threshold <= 1, "the threshold lies in [0, 1]")


def _check_thinking(thinking: Thinking, vocabulary: int) -> None:
    _tokens("thinking", (*thinking.closes, *(() if thinking.opens is None else (thinking.opens,))), vocabulary)
    _need("thinking", bool(thinking.closes), "something must end it")
    _need("thinking", thinking.budget >= 0, "the budget is not negative")


def _tokens(field: str, tokens: Iterable[int], vocabulary: int) -> None:
    _need(field, all(0 <= token < vocabulary for token in tokens), f"token ids lie in [0, {vocabulary})")


def _need(field: str, fine: bool, reason: str) -> None:
    if not fine:
        raise InvalidRequest(field, reason)
