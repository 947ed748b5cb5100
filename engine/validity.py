"""Validates a request against the model before it is queued."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from engine.errors import ContextTooLong, InvalidRequest
from engine.load.load import LoadedModel
from engine.schedule.sequence import text_tokens
from engine.step.content import ContentEncoder
from engine.step.input import FINAL_NORM, StepFeatures
from engine.types.request import Dry, ReasoningLimit, Request, SamplingParams, TimestampRule, Xtc


def check_request(request: Request, loaded: LoadedModel, *, drafters: Collection[str], chunk: int) -> None:
    """Raise InvalidRequest with the name of an invalid field, or ContextTooLong.

    chunk  maximum prompt tokens of a step
    """
    info, capacity, encoder = loaded.info, loaded.capacity, loaded.encoder
    if not request.prompt:
        raise InvalidRequest("prompt", "the prompt has no tokens")
    if len(request.prompt) > capacity - (0 if request.prefill_only else 1):
        raise ContextTooLong(len(request.prompt), capacity, max_context=info.max_context)
    _check_contents(request, loaded.content_encoder, chunk)
    _check_prompt(request, info.vocabulary, None if encoder is None else encoder.image_token)
    check_sampling(request, info.vocabulary)
    _check_token_ids("continue_from", request.emitted, info.vocabulary)
    if request.emitted:
        generates = not request.prefill_only and request.score_from is None
        _require("continue_from", generates, "it needs a request that only generates tokens")
    if encoder is not None:
        encoder.check(request.media, request.prompt)
    else:
        _require("media", request.media is None, "this model has no encoder for media")
    _require_feature("contents", loaded, StepFeatures(contents=bool(request.contents)))
    _check_scores(request, info.vocabulary)
    _require_feature("pooling", loaded, StepFeatures(hidden_layers=() if request.pooling is None else (FINAL_NORM,)))
    _check_drafter(request.speculation.drafter, drafters)


def _require_feature(field: str, loaded: LoadedModel, features: StepFeatures) -> None:
    reason = loaded.runner.supports(features)
    _require(field, reason is None, reason or "")


def _check_prompt(request: Request, vocabulary: int, image_token: int | None) -> None:
    """Every token must have a row in the embedding, be the placeholder of an image, or be part of a content."""
    # Loops in C: a prompt may have hundreds of thousands of tokens.
    if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        _check_token_ids("prompt", (token for token in text_tokens(request) if token != image_token), vocabulary)


def _check_contents(request: Request, encoder: ContentEncoder | None, chunk: int) -> None:
    """Contents lie in the prompt, in order, the entry of each fits into the memory of all, and a step computes those
    of their tokens that attend to each other.
    """
    if not request.contents:
        return
    if encoder is None:
        raise InvalidRequest("contents", "this model reads text only")
    end = 0
    for content in request.contents:
        in_order = end <= content.start < content.stop <= len(request.prompt)
        span = f"[{content.start}, {content.stop})"
        _require("contents", in_order, f"the {content.kind} at {span} is not after the others in the prompt")
        size = encoder.entry_bytes(content)
        reason = f"the {content.kind} at {span} takes {size} bytes, and all may take {encoder.budget_bytes}"
        _require("contents", size <= encoder.budget_bytes, reason)
        end = content.stop
    length = encoder.range_length(request.prompt, request.contents)
    reason = f"{length} tokens of an image attend to each other, and a step computes at most {chunk} tokens"
    _require("contents", length <= chunk, reason)


def _check_scores(request: Request, vocabulary: int) -> None:
    start, prompt = request.score_from, request.prompt
    if start is not None:
        in_prompt = 0 <= start <= len(prompt)
        _require("score_from", in_prompt, f"position {start} is not in the prompt's {len(prompt)} tokens")
        is_text = all(token < vocabulary for token in prompt[start:]) and _contents_end(request) <= start
        _require("score_from", is_text, "the placeholder of an image cannot be scored")
    _check_token_ids("labels", request.label_tokens, vocabulary)


def _contents_end(request: Request) -> int:
    """The first token behind all contents."""
    return request.contents[-1].stop if request.contents else 0


def _check_drafter(drafter: str, available: Collection[str]) -> None:
    others = f"it has {' and '.join(available)}" if available else "it has none"
    is_available = drafter in ("auto", "none", *available)
    _require("speculation.drafter", is_available, f"this server has no drafter {drafter!r}, {others}")


def check_sampling(request: Request, vocabulary: int) -> None:
    """Check the parameters that decide which tokens may follow. Raises InvalidRequest with the name of the field."""
    params = request.sampling
    _check_token_ids("logit_bias", (token for token, _ in params.logit_bias), vocabulary)
    _check_token_ids("stop_token_ids", request.stop_token_ids, vocabulary)
    if params.allowed_tokens is not None:
        _check_token_ids("allowed_tokens", params.allowed_tokens, vocabulary)
        _require("allowed_tokens", bool(params.allowed_tokens), "at least one token must be allowed")
    for word in params.bad_words:
        _check_token_ids("bad_words", word, vocabulary)
        _require("bad_words", bool(word), "a bad word needs at least one token")
    _require("min_tokens", request.min_tokens >= 0, "must not be negative")
    limit = request.max_tokens
    _require(
        "min_tokens", limit is None or request.min_tokens <= limit, f"must not exceed max_tokens, which is {limit}"
    )
    if request.reasoning_limit is not None:
        _check_reasoning_limit(request.reasoning_limit, vocabulary)
    if request.timestamps is not None:
        _check_timestamps(request.timestamps, vocabulary)
    _check_filters(params)


def _check_filters(params: SamplingParams) -> None:
    _require("typical_p", 0 < params.typical_p <= 1, "must lie in (0, 1]")
    _require("top_n_sigma", 0 <= params.top_n_sigma < inf, "must be at least 0 and finite")
    if params.dry is not None:
        _check_dry(params.dry)
    if params.xtc is not None:
        _check_xtc(params.xtc)


def _check_dry(dry: Dry) -> None:
    _require("dry", 0 <= dry.multiplier < inf, "the multiplier must be at least 0 and finite")
    _require("dry", 1 <= dry.base < inf, "the base must be at least 1 and finite")
    _require("dry", dry.allowed_length >= 1, "the allowed length must be at least 1")
    _require("dry", dry.lookback >= -1, "the range must be at least 0 tokens, or -1 for all")


def _check_xtc(xtc: Xtc) -> None:
    _require("xtc", 0 <= xtc.probability <= 1, "the probability must lie in [0, 1]")
    _require("xtc", 0 <= xtc.threshold <= 1, "the threshold must lie in [0, 1]")


def _check_reasoning_limit(limit: ReasoningLimit, vocabulary: int) -> None:
    start = () if limit.start_token is None else (limit.start_token,)
    _check_token_ids("thinking", (*limit.end_tokens, *start), vocabulary)
    _require("thinking", bool(limit.end_tokens), "it needs an end token")
    _require("thinking", limit.budget >= 0, "the budget must not be negative")


def _check_timestamps(rule: TimestampRule, vocabulary: int) -> None:
    _check_token_ids("timestamps", (*rule.suppressed, *rule.suppressed_first), vocabulary)
    _require("timestamps", 0 <= rule.end_token < rule.first < vocabulary, "the first timestamp follows the end token")
    _require("timestamps", rule.max_initial is None or rule.max_initial >= 0, "the latest first one is negative")


def _check_token_ids(field: str, tokens: Iterable[int], vocabulary: int) -> None:
    _require(field, all(0 <= token < vocabulary for token in tokens), f"token ids must lie in [0, {vocabulary})")


def _require(field: str, valid: bool, reason: str) -> None:
    if not valid:
        raise InvalidRequest(field, reason)
