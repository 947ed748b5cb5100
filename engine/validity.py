"""Whether the numbers in a request make sense, asked before anything is computed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from engine.errors import InvalidRequest
from engine.types.request import Dry, ReasoningLimit, Request, SamplingParams, Xtc


def check_prompt(prompt: Sequence[int], vocabulary: int, image_token: int | None) -> None:
    """Every token has a row of the embedding, or is the placeholder of an image. Raises InvalidRequest."""
    # Loops in C: a prompt may have hundreds of thousands of tokens.
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        _check_token_ids("prompt", (token for token in prompt if token != image_token), vocabulary)


def check_sampling(request: Request, vocabulary: int) -> None:
    """Everything that says which tokens may follow. Raises InvalidRequest, which names the field."""
    params = request.sampling
    _check_token_ids("logit_bias", (token for token, _ in params.logit_bias), vocabulary)
    _check_token_ids("stop_token_ids", request.stop_token_ids, vocabulary)
    if params.allowed_tokens is not None:
        _check_token_ids("allowed_tokens", params.allowed_tokens, vocabulary)
        _require("allowed_tokens", bool(params.allowed_tokens), "without any token nothing can be said")
    for word in params.bad_words:
        _check_token_ids("bad_words", word, vocabulary)
        _require("bad_words", bool(word), "a bad word has at least one token")
    _require("min_tokens", request.min_tokens >= 0, "it is not negative")
    most = request.max_tokens
    _require("min_tokens", most is None or request.min_tokens <= most, f"it is {most} at most, which is max_tokens")
    if request.reasoning_limit is not None:
        _check_reasoning_limit(request.reasoning_limit, vocabulary)
    _check_filters(params)


def _check_filters(params: SamplingParams) -> None:
    _require("typical_p", 0 < params.typical_p <= 1, "it lies in (0, 1]")
    _require("top_n_sigma", 0 <= params.top_n_sigma < inf, "it is a number from 0 on")
    if params.dry is not None:
        _check_dry(params.dry)
    if params.xtc is not None:
        _check_xtc(params.xtc)


def _check_dry(dry: Dry) -> None:
    _require("dry", 0 <= dry.multiplier < inf, "the multiplier is a number from 0 on")
    _require("dry", 1 <= dry.base < inf, "the base is a number from 1 on")
    _require("dry", dry.allowed_length >= 1, "the allowed length is 1 at least")
    _require("dry", dry.lookback >= -1, "it looks at 0 tokens and more, or with -1 at all")


def _check_xtc(xtc: Xtc) -> None:
    _require("xtc", 0 <= xtc.probability <= 1, "the probability lies in [0, 1]")
    _require("xtc", 0 <= xtc.threshold <= 1, "the threshold lies in [0, 1]")


def _check_reasoning_limit(thinking: ReasoningLimit, vocabulary: int) -> None:
    _check_token_ids(
        "thinking",
        (*thinking.end_tokens, *(() if thinking.start_token is None else (thinking.start_token,))),
        vocabulary,
    )
    _require("thinking", bool(thinking.end_tokens), "something must end it")
    _require("thinking", thinking.budget >= 0, "the budget is not negative")


def _check_token_ids(field: str, tokens: Iterable[int], vocabulary: int) -> None:
    _require(field, all(0 <= token < vocabulary for token in tokens), f"token ids lie in [0, {vocabulary})")


def _require(field: str, valid: bool, reason: str) -> None:
    if not valid:
        raise InvalidRequest(field, reason)
